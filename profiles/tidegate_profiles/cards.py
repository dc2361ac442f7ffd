"""Accelerators and what the datasheets of their makers say of them.

The arithmetic is dense bfloat16 with sums in float32. Datasheets of NVIDIA print the figure with sparsity too or alone,
which is twice as large and does not count here. A datasheet's GB of card memory are GiB.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    product: str
    """As Kubernetes labels the node."""
    flops: float
    bytes_a_second: float
    memory_gib: float
    source: str
    """The datasheet of the maker."""


def _nvidia(product: str, *, flops: float, bytes_a_second: float, memory_gib: float, sheet: str) -> Card:
    return Card(
        product=product,
        flops=flops,
        bytes_a_second=bytes_a_second,
        memory_gib=memory_gib,
        source=f"NVIDIA's datasheet of the {sheet}",
    )


CARDS = {
    "a100-40": _nvidia(
        "NVIDIA-A100-SXM4-40GB", flops=3.12e14, bytes_a_second=1.555e12, memory_gib=40, sheet="A100 40GB SXM"
    ),
    "a100-80": _nvidia(
        "NVIDIA-A100-SXM4-80GB", flops=3.12e14, bytes_a_second=2.039e12, memory_gib=80, sheet="A100 80GB SXM"
    ),
    "a100-80-pcie": _nvidia(
        "NVIDIA-A100-80GB-PCIe", flops=3.12e14, bytes_a_second=1.935e12, memory_gib=80, sheet="A100 80GB PCIe"
    ),
    "a5000": _nvidia("NVIDIA-RTX-A5000", flops=1.111e14, bytes_a_second=7.68e11, memory_gib=24, sheet="RTX A5000"),
    "a6000": _nvidia("NVIDIA-RTX-A6000", flops=1.548e14, bytes_a_second=7.68e11, memory_gib=48, sheet="RTX A6000"),
    "b200": _nvidia(
        "NVIDIA-B200", flops=2.25e15, bytes_a_second=8e12, memory_gib=180, sheet="DGX B200, an eighth of it"
    ),
    "h100-pcie": _nvidia("NVIDIA-H100-PCIe", flops=7.56e14, bytes_a_second=2e12, memory_gib=80, sheet="H100 PCIe"),
    "h100-sxm": _nvidia("NVIDIA-H100-80GB-HBM3", flops=9.9e14, bytes_a_second=3.35e12, memory_gib=80, sheet="H100 SXM"),
    "h200": _nvidia("NVIDIA-H200", flops=9.9e14, bytes_a_second=4.8e12, memory_gib=141, sheet="H200 SXM"),
    "h800": _nvidia("NVIDIA-H800", flops=9.9e14, bytes_a_second=3.35e12, memory_gib=80, sheet="H800 SXM"),
    "l40": _nvidia("NVIDIA-L40", flops=1.81e14, bytes_a_second=8.64e11, memory_gib=48, sheet="L40"),
    "l40s": _nvidia("NVIDIA-L40S", flops=3.62e14, bytes_a_second=8.64e11, memory_gib=48, sheet="L40S"),
    "mi300x": Card(
        product="AMD_Instinct_MI300X_OAM",
        flops=1.307e15,
        bytes_a_second=5.3e12,
        memory_gib=192,
        source="AMD's datasheet of the Instinct MI300X",
    ),
    "rtx4090": _nvidia(
        "NVIDIA-GeForce-RTX-4090", flops=1.65e14, bytes_a_second=1.008e12, memory_gib=24, sheet="GeForce RTX 4090"
    ),
}


class UnknownCard(ValueError):
    """There is no such card in the table; the message lists those that are."""


def find(name: str) -> Card:
    """The card by its name in the table, or by its product. Raises `UnknownCard`."""
    wanted = name.lower()
    for short, card in CARDS.items():
        if wanted in (short, card.product.lower()):
            return card
    raise UnknownCard(f"no datasheet of {name!r} is at hand; known are {', '.join(CARDS)}")


def vllm_limits(card: Card) -> tuple[int, int]:
    """The defaults of vLLM 0.32 for `--max-num-seqs` and `--max-num-batched-tokens` of a server on such a card."""
    if card.memory_gib >= 160:
        return 1024, 16384
    if card.memory_gib >= 70 and "A100" not in card.product:
        return 1024, 8192
    return 256, 2048
