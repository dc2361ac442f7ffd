"""docs/labels.md from the table of labels."""

from tidegate_policy import label_table
from tidegate_policy.label_table import Kind, Label

_MAX, _OVERDUE = label_table.MAX_TEXT, round(label_table.MOST_OVERDUE_S)
OPENING = """# Labels of a request

`tools/reference/generate` makes this page from `policy/tidegate_policy/label_table.py`. An engine with Tidegate's scheduler
reads these labels in `vllm_xargs` of a request (`SamplingParams.extra_args` in vLLM). The gateway writes them, and removes
those that its clients send ([http.md](http.md)). A program that sends requests to an engine directly may write them:

```json
{"model": "m", "prompt": "Hello", "vllm_xargs": {"tg.tenant": "acme", "tg.urgency": 1, "tg.out_pred": 120}}
```

| label | type | range | without the label | meaning |
|---|---|---|---|---|
"""
CLOSING = f"""
## Values that cannot be used

No request is rejected for its labels. `tidegate_engine_bad_labels_total` counts each label that is not taken as it
is ([metrics.md](metrics.md)).

| value | effect | counted as |
|---|---|---|
| null, or an empty text in place of a text | as without the label | not counted |
| a value of another type, a number that is not finite, or a value out of range | as without the label | its key |
| a text of more than {_MAX} characters | its first {_MAX} characters | its key |
| an instant more than {_OVERDUE} s in the past | {_OVERDUE} s in the past | its key |
| a label of another name that begins with `tg.` | none | `other` |

A number may be a text of digits. The digits behind the point of a whole number are dropped. Keys without `tg.` are those of
vLLM and of its plugins.
"""


def page() -> str:
    return OPENING + "".join(map(_row, label_table.LABELS)) + CLOSING


def _row(label: Label) -> str:
    return f"| `{label.key}` | {label.kind} | {_range(label)} | {label.default} | {label.meaning} |\n"


def _range(label: Label) -> str:
    if label.kind is Kind.TEXT:
        return f"1 to {_MAX} characters"
    return f"{label.low:,.15g} to {label.high:,.15g}"
