"""Text to SQL with a real SQLite database: drafts in parallel, corrections while there is time, and one answer.

    python examples/text_to_sql.py "How much did each city order?"

A draft counts only if SQLite runs it. A draft that fails goes back to the model with SQLite's error. The deadline of the
workflow decides when to stop: no correction starts in its last quarter. With simulated engines no draft ever runs, because
their answers are filler.
"""

import argparse
import asyncio
import sqlite3
import sys

import openai

import tidegate_client

SCHEMA = """
CREATE TABLE customer (id INTEGER PRIMARY KEY, name TEXT, city TEXT);
CREATE TABLE orders (id INTEGER PRIMARY KEY, customer_id INTEGER REFERENCES customer, euros REAL);
"""
ROWS = """
INSERT INTO customer VALUES (1, 'Ada', 'Lima'), (2, 'Ben', 'Oslo'), (3, 'Cai', 'Oslo');
INSERT INTO orders VALUES (1, 1, 20.0), (2, 2, 5.5), (3, 3, 14.0), (4, 2, 30.0);
"""
READS = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION}


def database() -> sqlite3.Connection:
    """The tables in memory; SQLite refuses statements that would change them."""
    connection = sqlite3.connect(":memory:")
    connection.executescript(SCHEMA + ROWS)
    connection.set_authorizer(lambda action, *_: sqlite3.SQLITE_OK if action in READS else sqlite3.SQLITE_DENY)
    return connection


def run(connection: sqlite3.Connection, sql: str) -> tuple[list[object], str]:
    """The rows of a query, or none and the reason."""
    try:
        return connection.execute(sql).fetchmany(20), ""
    except (sqlite3.Error, sqlite3.Warning) as error:
        return [], str(error)


async def ask(client: openai.AsyncOpenAI, model: str, text: str, *, temperature: float = 0.0) -> str:
    """The model's answer without the fence that models put around SQL."""
    answer = await client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": text}], max_tokens=96, temperature=temperature
    )
    said = (answer.choices[0].message.content or "").strip()
    return said.removeprefix("```sql").removeprefix("```").removesuffix("```").strip()


async def answered(options: argparse.Namespace) -> int:
    connection = database()
    task = f"Schema:{SCHEMA}\nQuestion: {options.question}\nAnswer with one SQLite query and nothing else."
    async with openai.AsyncOpenAI(base_url=f"{options.url}/v1", api_key=options.key) as client:
        model = options.model or (await client.models.list()).data[0].id
        stages = [
            tidegate_client.Stage(name="draft", parallel=2),
            tidegate_client.Stage(name="correct", after=["draft"], repeat=max(options.corrections, 1)),
            tidegate_client.Stage(name="answer", after=["correct"]),
        ]
        async with tidegate_client.AsyncWorkflow(client, deadline_s=options.deadline_s, stages=stages) as flow:
            drafts = [ask(flow.stage("draft"), model, task, temperature=heat) for heat in (0.0, 0.8)]
            tried = [(sql, *run(connection, sql)) for sql in await asyncio.gather(*drafts)]
            sql, rows, fault = min(tried, key=lambda attempt: bool(attempt[2]))
            corrections = 0
            while fault and corrections < options.corrections and flow.left_s > options.deadline_s / 4:
                corrections += 1
                sql = await ask(flow.stage("correct"), model, f"{task}\nThis query failed: {sql}\nSQLite: {fault}")
                rows, fault = run(connection, sql)
            if not fault:
                phrase = f"{options.question}\nThe query gave {rows}. Answer briefly."
                print(await ask(flow.stage("answer"), model, phrase))
    print(f"SQL after {corrections} corrections: {sql}\n" + (f"It fails: {fault}" if fault else f"Rows: {rows}"))
    print(f"Workflow {flow.id}: {flow.outcome}, {flow.record.left_ms} ms left")
    return 1 if fault else 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Answers a question about a database.")
    parser.add_argument("question", nargs="?", default="How much did each city order?")
    parser.add_argument(
        "--url", default="http://127.0.0.1:8000", help="the gateway, without /v1 (default: %(default)s)"
    )
    parser.add_argument("--key", default="none", help="API key, if the gateway has keys")
    parser.add_argument("--model", help="default: the first model of the gateway")
    parser.add_argument("--deadline-s", type=float, default=30.0)
    parser.add_argument("--corrections", type=int, default=3, help="at most")
    return asyncio.run(answered(parser.parse_args()))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except openai.APIConnectionError as error:
        where = f"no gateway answers at {error.request.url} ({error})"
        sys.exit(f"text_to_sql.py: {where}; start one (tidegate up) or give its address by --url")
    except openai.APIError as error:
        sys.exit(f"text_to_sql.py: {error}")
