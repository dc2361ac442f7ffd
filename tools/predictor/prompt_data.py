"""Readers of the public data on which predictions are measured. The data itself is no part of the project."""

import collections
import csv
import gzip
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A prompt with the label of one task."""

    text: str
    label: str
    source: str
    group: str = ""
    """Examples of one group are never on both sides of a split; empty = the text itself."""


def lines(path: Path) -> Iterator[Any]:
    with gzip.open(path, "rt") as file:
        yield from (json.loads(line) for line in file)


def task_types(data: Path) -> list[Example]:
    """code, math, tool-use, writing or chat, by the source of a prompt."""
    prompts, tools = data / "prompts", data / "tool_prompts"
    found = [("code", "HumanEval", row["prompt"]) for row in lines(prompts / "HumanEval.jsonl.gz")]
    found += [("code", "MBPP", row["text"]) for row in lines(prompts / "mbpp_test.jsonl.gz")]
    found += [("math", "GSM8K", row["question"]) for row in lines(prompts / "gsm8k_train.jsonl.gz")][:3000]
    kinds = {
        "coding": "code",
        "math": "math",
        "writing": "writing",
        "roleplay": "chat",
        "humanities": "chat",
        "stem": "chat",
    }
    found += [
        (kinds[row["category"]], "MT-bench", row["turns"][0])
        for row in lines(prompts / "mt_bench_question.jsonl.gz")
        if row["category"] in kinds
    ]
    for row in lines(prompts / "user_oriented_instructions.jsonl.gz"):
        found.append(("writing", "instructions", f"{row['instruction']} {row['instances'][0]['input']}"))
    found += [
        ("tool-use", "StableToolBench", row["query"])
        for row in lines(tools / "stabletoolbench_solvable_queries.jsonl.gz")
    ]
    found += [("tool-use", "ToolBench", row["query"]) for row in lines(tools / "toolbench_gpt35_cot_traces.jsonl.gz")]
    return [Example(label=label, source=source, text=text) for label, source, text in found]


def tool_use(data: Path) -> list[Example]:
    """Whether an answer to a prompt with tools calls one of them (BFCL)."""
    found = []
    for path in sorted((data / "tool_prompts" / "bfcl_v4").glob("*.json.gz")):
        kind = path.name.removeprefix("BFCL_v4_").removesuffix(".json.gz")
        if not kind.startswith(("irrelevance", "live_", "simple_", "multiple", "parallel")):
            continue
        for row in lines(path):
            question = " ".join(str(turn["content"]) for turn in row["question"][0] if turn["role"] == "user")
            offered = " ".join(f"{item['name']} {item.get('description', '')}" for item in row["function"])
            label = "none" if "irrelevance" in kind else "call"
            source = "live" if kind.startswith("live") else "made"
            found.append(Example(text=f"{question}\n{offered}", label=label, source=source, group=question))
    return found


def urgency(data: Path) -> list[Example]:
    """Five levels of triage (0 = most urgent), and three of tickets."""
    scenarios = json.loads((data / "urgency" / "nursesim_gpt_scenarios.json").read_text())
    found = [
        Example(
            text=f"{item['chief_complaint']} {item['history'].get('time_course', '')}",
            label=str(int(level) - 1),
            source="triage",
        )
        for level, items in scenarios.items()
        for item in items
    ]
    with (data / "urgency" / "synthetic_it_tickets.csv").open() as file:
        for row in csv.DictReader(file):
            text = f"{row['short_description']} {row['description']}"
            found.append(Example(text=text, label=str(int(row["urgency"])), source="tickets", group=row["description"]))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Length:
    """A call with the length of its output."""

    kind: str
    """Its template, stage, tool or session: what a gateway knows of it."""
    prompt_tokens: int
    output_tokens: int
    text: str = ""


def lengths(data: Path) -> dict[str, Sequence[Length]]:
    """Calls by source, in their own order where there is one."""
    found: dict[str, list[Length]] = collections.defaultdict(list)
    with gzip.open(data / "augmented_merge" / "segments.csv.gz", "rt") as file:
        for row in csv.DictReader(file):
            found["tool sessions, by tool"].append(_length(row["tool"], row["prompt_tokens"], row["completion_tokens"]))
    for row in lines(data / "text2sql_workflows" / "workflows.jsonl.gz"):
        for step in row["steps"]:
            found["text-to-SQL, by stage"].append(_length(step["step"], step["input_length"], step["output_length"]))
    for row in lines(data / "agentic_traces" / "exgentic_swebench_claude_code.jsonl.gz"):
        if row.get("input_tokens") and row.get("output_tokens"):
            found["coding sessions, by session"].append(
                _length(row["session_id"], row["input_tokens"], row["output_tokens"])
            )
    with gzip.open(data / "azure_llm_2023" / "AzureLLMInferenceTrace_conv.csv.gz", "rt") as file:
        for row in csv.DictReader(file):
            found["production chat, one kind"].append(_length("chat", row["ContextTokens"], row["GeneratedTokens"]))
    for name, path in (
        ("P3 gold answers, by template", data / "prompts" / "p3_other_tasks_sample.jsonl.gz"),
        ("relational gold answers, by template", data / "relational_prompts" / "prompts.jsonl.gz"),
    ):
        for row in lines(path):
            found[name].append(_length(row["template"], row["prompt_tokens"], row["output_tokens"], row["prompt"]))
    return found


def _length(kind: str, prompt: Any, output: Any, text: str = "") -> Length:
    return Length(kind=kind, prompt_tokens=max(int(prompt), 1), output_tokens=max(int(output), 1), text=text)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolTurn:
    """A call of a session, and the tool after it."""

    tool: str
    """Empty = the answer invokes none."""
    seconds: float | None = None
    """Until the session returns; None = not published, or the session does not return."""
    returned: int = 0
    """Tokens by which the prompt grew beyond the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSession:
    """The calls of a session, in their order."""

    id: str
    kind: str
    """What a gateway knows of the calls before they run: their class or stage."""
    turns: Sequence[ToolTurn]


def tool_sessions(data: Path) -> dict[str, list[ToolSession]]:
    """Sessions with tools by source."""
    merged: dict[str, list[dict[str, str]]] = {}
    with gzip.open(data / "augmented_merge" / "segments.csv.gz", "rt") as file:
        for row in csv.DictReader(file):
            merged.setdefault(row["request_id"], []).append(row)
    mixed = random.Random(1).sample(list(merged.items()), len(merged))  # the file is sorted by tool
    found = {
        source: [
            ToolSession(id=name, kind=rows[0]["tool"] if told else "", turns=[_segment(row) for row in rows])
            for name, rows in mixed
        ]
        for source, told in (("tool sessions, a class for each tool", True), ("tool sessions, one class", False))
    }
    found["ToolBench runs, by split"] = [
        ToolSession(id=row["id"], kind=row["split"], turns=[*map(_named, _tools(row)), ToolTurn(tool="")])
        for row in lines(data / "tool_prompts" / "toolbench_gpt35_cot_traces.jsonl.gz")
    ]
    coding: dict[str, list[Any]] = collections.defaultdict(list)
    for row in lines(data / "agentic_traces" / "exgentic_swebench_claude_code.jsonl.gz"):
        coding[row["session_id"]].append(row)
    found["coding sessions, names not published"] = [
        ToolSession(id=name, kind="", turns=_gaps(sorted(rows, key=lambda row: float(row["start_time_s"]))))
        for name, rows in coding.items()
    ]
    return found


def _segment(row: dict[str, str]) -> ToolTurn:
    if not row["api_time_s"]:
        return ToolTurn(tool="")
    return ToolTurn(tool=row["tool"], seconds=float(row["api_time_s"]), returned=int(row["api_return_tokens"] or 0))


def _tools(row: Any) -> Iterator[str]:
    """The names of the tools of a run, from the printed calls in its answer."""
    nodes = list(row["answer"]["answer_details"])
    while nodes:
        node = nodes.pop(0)
        if node["role"] == "tool" and node["message"].startswith("{'name': '"):
            yield node["message"].split("'")[3]
        nodes = list(node["next"][:1])


def _named(tool: str) -> ToolTurn:
    return ToolTurn(tool=tool)


def _gaps(rows: Sequence[Any]) -> list[ToolTurn]:
    """Calls that overlap the next one have no gap: a gateway sees that they run side by side."""
    turns = []
    for row, following in zip(rows, [*rows[1:], None], strict=True):
        tool = "a tool" if row["finish_reasons"] == ["tool_calls"] else ""
        gap_s = None if following is None else float(following["start_time_s"]) - float(row["end_time_s"])
        used = int(row["input_tokens"] or 0) + int(row["output_tokens"] or 0)
        grown = 0 if following is None else max(int(following["input_tokens"] or 0) - used, 0)
        turns.append(ToolTurn(tool=tool, seconds=gap_s if gap_s is not None and gap_s >= 0 else None, returned=grown))
    return turns
