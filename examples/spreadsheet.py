"""A spreadsheet as a relQuery: one question about every row of a CSV file, and the answers as a new column.

    python examples/spreadsheet.py countries.csv answered.csv --question "Name the capital of {{country}}."

The id of the relQuery follows from the file and the question. A run that was interrupted can be started again: the gateway
goes on meanwhile, and the second run reads the answers that exist and waits for the rest. No row is asked twice.
"""

import argparse
import csv
import hashlib
import pathlib
import sys

import openai

import tidegate_client


def main() -> int:
    parser = argparse.ArgumentParser(description="Asks a question about every row of a CSV file.")
    parser.add_argument("source", type=pathlib.Path, help="CSV with a line of column names")
    parser.add_argument("target", type=pathlib.Path, help="the same with the answers")
    parser.add_argument("--question", required=True, help="a text with {{column}} in it; put the columns at the end")
    parser.add_argument("--column", default="answer", help="name of the new column")
    parser.add_argument(
        "--url", default="http://127.0.0.1:8000", help="the gateway, without /v1 (default: %(default)s)"
    )
    parser.add_argument("--key", default="none", help="API key, if the gateway has keys")
    parser.add_argument("--model", help="default: the first model of the gateway")
    parser.add_argument("--deadline-s", type=float, default=3600.0)
    options = parser.parse_args()
    with options.source.open(newline="") as file:
        rows = list(csv.DictReader(file))
    if not rows:
        parser.error(f"{options.source} has no rows")
    content = options.source.read_bytes() + options.question.encode()
    name = f"sheet-{hashlib.sha256(content).hexdigest()[:24]}"
    answers: dict[int, str] = {}
    failed, ended_early = 0, ""
    with openai.OpenAI(base_url=f"{options.url}/v1", api_key=options.key) as client:
        results = tidegate_client.relquery(
            client,
            id=name,
            model=options.model or client.models.list().data[0].id,
            template=options.question,
            rows=rows,
            deadline_s=options.deadline_s,
            max_tokens=48,
        )
        try:
            for result in results:
                failed += result.error is not None
                answers[result.row] = f"error: {result.error.message}" if result.error else result.text or ""
                print(f"\r{len(answers)}/{len(rows)} rows, {failed} failed", end="", file=sys.stderr)
        except tidegate_client.RelQueryIncomplete as error:  # what came is written all the same
            ended_early = str(error)
    print(file=sys.stderr)
    with options.target.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0], options.column])
        writer.writeheader()
        writer.writerows({**row, options.column: answers.get(number, "")} for number, row in enumerate(rows))
    print(f"{name}: {len(answers)} of {len(rows)} rows answered, {failed} of them with an error; see {options.target}")
    if ended_early:
        print(f"spreadsheet.py: {ended_early}", file=sys.stderr)
    return 1 if ended_early or failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except openai.APIConnectionError as error:
        where = f"no gateway answers at {error.request.url} ({error})"
        sys.exit(f"spreadsheet.py: {where}; start one (tidegate up) or give its address by --url")
    except (OSError, openai.APIError) as error:
        sys.exit(f"spreadsheet.py: {error}")
