"""`tidegate profile estimate`: the profile of an engine that nobody has measured, from the datasheet of its accelerator.

The profile goes to the standard output, and how far such estimates were from measurements to the standard error.
"""

import argparse
import dataclasses
import json
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from tidegate_cli import profile_document
from tidegate_cli.command_errors import Failed, Usage
from tidegate_profiles import cards, estimate_error, model_size, roofline

WEIGHT_BYTES = 2.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--accelerator",
        required=True,
        metavar="NAME",
        help=f"one of {', '.join(cards.CARDS)}, or the product as Kubernetes labels it",
    )
    parser.add_argument(
        "--tensor-parallel",
        type=_number(int),
        default=1,
        metavar="N",
        help="cards of one engine (default: %(default)s)",
    )
    parser.add_argument("--config", type=pathlib.Path, metavar="FILE", help="config.json of a Hugging Face model")
    parser.add_argument("--model", metavar="NAME", help="name of the model (default: what the configuration says)")
    parser.add_argument(
        "--parameters",
        type=_number(float),
        metavar="N",
        help="of the model, such as 8.03e9 (default: counted from --config)",
    )
    parser.add_argument("--layers", type=_number(int), metavar="N", help="of the model (default: as in --config)")
    parser.add_argument("--hidden", type=_number(int), metavar="N", help="width of the model (default: as in --config)")
    parser.add_argument(
        "--kv-bytes",
        type=_number(float),
        metavar="N",
        help="bytes of a token in the KV caches of all cards (default: as in --config, in 16 bits)",
    )
    parser.add_argument(
        "--weight-bytes",
        type=_number(float),
        metavar="N",
        help="bytes of a parameter (default: as in --config, else 2)",
    )
    parser.add_argument(
        "--max-batch",
        type=_number(int),
        metavar="N",
        help="the engine's --max-num-seqs (default: vLLM's for the accelerator)",
    )
    parser.add_argument(
        "--max-step-tokens",
        type=_number(int),
        metavar="N",
        help="the engine's --max-num-batched-tokens (default: vLLM's for the accelerator)",
    )


def run(options: argparse.Namespace) -> int:
    """Prints the profile."""
    try:
        card = cards.find(options.accelerator)
        facts = _facts(options, card)
        errors = tuple(estimate_error.sentences())
        text = document(options, card, facts, errors)
    except (cards.UnknownCard, model_size.UnknownSize) as error:
        raise Usage(str(error)) from error
    except roofline.TooLarge as error:
        raise Failed(f"{error}: use more cards, or fewer --weight-bytes") from error
    sys.stdout.write(text)
    sys.stderr.write(
        "This profile is an estimate from a datasheet. Nobody has measured it.\n"
        + "".join(f"{sentence}\n" for sentence in errors)
        + "`dispatch.learnCosts` corrects it by the answers of the engines; `tidegate profile --url ENGINE` measures one.\n"
    )
    return 0


def document(options: argparse.Namespace, card: cards.Card, facts: roofline.Facts, errors: Sequence[str]) -> str:
    """The profile as YAML. `errors` say how far such estimates are from measurements. Raises `roofline.TooLarge`."""
    max_batch, max_step_tokens = cards.vllm_limits(card)
    return profile_document.text(
        {
            "model": _name(options),
            "accelerator": card.product,
            "tensor_parallel": facts.cards,
            "source": f"No measurement: a roofline from {card.source}. {' '.join(errors)}",
            "derivation": roofline.DERIVATION,
            "facts": dataclasses.asdict(facts),
        },
        roofline.estimate(facts),
        kv_tokens=roofline.kv_tokens(facts),
        max_batch=options.max_batch or max_batch,
        max_step_tokens=options.max_step_tokens or max_step_tokens,
    )


def _facts(options: argparse.Namespace, card: cards.Card) -> roofline.Facts:
    """Model and cards. Raises `model_size.UnknownSize`."""
    given = {
        "parameters": options.parameters,
        "layers": options.layers,
        "hidden": options.hidden,
        "kv_bytes_a_token": options.kv_bytes,
        "weight_bytes": options.weight_bytes,
    }
    read: dict[str, Any] = {"weight_bytes": WEIGHT_BYTES}
    if options.config is not None:
        config = _config(options.config)
        size = model_size.of_config(config, cards=options.tensor_parallel, parameters=options.parameters)
        read |= dataclasses.asdict(size)
        if options.weight_bytes is None:
            read["weight_bytes"] = model_size.weight_bytes(config)
    known = {**read, **{name: value for name, value in given.items() if value is not None}}
    if missing := [name for name in given if name not in known]:
        raise Usage(f"the size of the model is unknown ({', '.join(missing)}): give --config, or all numbers by hand")
    return roofline.Facts(
        **known,
        cards=options.tensor_parallel,
        flops_a_card=card.flops,
        bytes_a_second_a_card=card.bytes_a_second,
        memory_gib_a_card=card.memory_gib,
    )


def _config(path: pathlib.Path) -> Mapping[str, Any]:
    try:
        config = json.loads(path.read_text())
    except OSError as error:
        raise Failed(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise Failed(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise Failed(f"{path} is no model's configuration: it has no fields")
    return config


def _name(options: argparse.Namespace) -> str:
    if options.model is not None:
        return str(options.model)
    named = _config(options.config).get("_name_or_path") if options.config is not None else None
    return str(named or "unknown")


def _number(kind: type[int] | type[float]) -> Any:
    """Parses a number above zero."""

    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = 0
        if not 0 < value < 1e18:
            raise argparse.ArgumentTypeError(f"{text!r} is no {'whole ' if kind is int else ''}number above zero")
        return value

    return parse
