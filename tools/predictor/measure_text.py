"""How well does the text model tell task type, urgency and tool use on held-out prompts? Prints a table.

    .venv/bin/python tools/predictor/measure_text.py DATA

DATA is a folder with the public files that `prompt_data` reads. Splits keep prompts of one group together. Other splits of
a task hold out a whole source, which shows what the model knows beyond the style of a source.
"""

import collections
import sys
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import linear_model
import prompt_data
from prompt_data import Example

Rule = Callable[[str], str]
Split = tuple[str, list[Example], list[Example]]
"""(what is tested, training, test)."""
CERTAIN = 0.6
"""The probability below which an answer would be unknown."""


def task_type_by_rule(text: str) -> str:
    low = text.lower()
    if any(word in low for word in ("def ", "function", "python", "```", "c++", "javascript", "code")):
        return "code"
    if any(word in low for word in ("api", "fetch", "retrieve")):
        return "tool-use"
    if sum(char.isdigit() for char in low) >= 2 and any(word in low for word in ("how many", "how much", "what is")):
        return "math"
    if any(word in low for word in ("write", "rewrite", "compose", "draft", "sentence")):
        return "writing"
    return "chat"


def urgency_by_rule(text: str) -> str:
    low = text.lower()
    if any(word in low for word in ("breathe", "unconscious", "not responding", "collapsed", "seizure")):
        return "0"
    if any(word in low for word in ("outage", "down", "chest pain", "severe", "bleeding", "unable")):
        return "1"
    return "2"


def held_out(examples: Sequence[Example]) -> Split:
    """Four fifths of the groups train, and one fifth tests."""
    fold = [zlib.crc32((item.group or item.text).encode()) % 5 for item in examples]
    return (
        "held-out fifth",
        [item for item, part in zip(examples, fold, strict=True) if part],
        [item for item, part in zip(examples, fold, strict=True) if not part],
    )


def unseen(examples: Sequence[Example], source: str) -> Split:
    return (
        f"unseen source {source}",
        [item for item in examples if item.source != source],
        [item for item in examples if item.source == source],
    )


def row(task: str, split: Split, rule: Rule) -> str:
    name, training, tests = split
    classes = sorted({item.label for item in training})
    weights = linear_model.fit([item.text for item in training], [item.label for item in training], classes)
    found = linear_model.predict(weights, [item.text for item in tests], classes)
    most = collections.Counter(item.label for item in training).most_common(1)[0][0]
    told = [(label, item) for (label, sure), item in zip(found, tests, strict=True) if sure >= CERTAIN]
    count = len(tests)
    shares = (
        sum(item.label == most for item in tests) / count,
        sum(rule(item.text) == item.label for item in tests) / count,
        sum(label == item.label for (label, _), item in zip(found, tests, strict=True)) / count,
        sum(label == item.label for label, item in told) / max(len(told), 1),
        len(told) / count,
    )
    return f"| {task} | {name} | {len(training)} / {count} | " + " | ".join(f"{share:.1%}" for share in shares) + " |"


def main(data: Path) -> None:
    print("| task | tested on | training / test | majority class | rules | text model | where certain | certain |")
    print("|---|---|---|---|---|---|---|---|")
    types = prompt_data.task_types(data)
    trained = [item for item in types if item.source != "MBPP"]
    print(row("task type", held_out(trained), task_type_by_rule), flush=True)
    for source in ("MBPP", "MT-bench", "ToolBench"):
        print(row("task type", unseen(types, source), task_type_by_rule), flush=True)
    calls = prompt_data.tool_use(data)
    print(row("tool use", held_out(calls), lambda _: "call"), flush=True)
    for source in ("live", "made"):
        print(row("tool use", unseen(calls, source), lambda _: "call"), flush=True)
    for source in ("triage", "tickets"):
        some = [item for item in prompt_data.urgency(data) if item.source == source]
        print(row(f"urgency ({source})", held_out(some), urgency_by_rule), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
