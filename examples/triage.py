"""Triage: a short call rates each message, and the rating gives the reply its urgency and its deadline.

    python examples/triage.py

The replies start together and compete for the engines. The policy `urgency` (the default) follows the deadlines, and the
policy `priority` follows the levels. A message whose rating is no level gets one by its words, and the output says so.
"""

import argparse
import asyncio
import sys
import time

import openai

import tidegate_client

MESSAGES = [
    "Where can I find the invoice of last month?",
    "Our production database is down and customers cannot pay!",
    "Please change the colour of our logo some time.",
    "Login fails for about half of our users since noon.",
    "Thank you, the new report is great.",
    "We believe that a password was stolen an hour ago.",
]
DEADLINE_S = {0: 8.0, 1: 12.0, 2: 20.0, 3: 40.0, 4: 60.0}
"""By urgency: 0 is the most urgent level."""
WORDS = {0: ("down", "stolen"), 1: ("fails", "error"), 2: ("invoice",), 3: ("change",)}


async def rated(client: openai.AsyncOpenAI, model: str, message: str) -> tuple[int, str]:
    """The level of a message, and where it comes from."""
    prompt = f"Rate the urgency of this message from 0 (emergency) to 4 (no action). Answer with one digit.\n{message}"
    answer = await client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": prompt}],
        max_tokens=2,
        extra_headers=tidegate_client.headers(deadline_s=5, urgency=1),
    )
    said = (answer.choices[0].message.content or "").strip()[:1]
    if said in set("01234"):
        return int(said), "model"
    level = next((level for level, words in WORDS.items() if any(word in message for word in words)), 4)
    return level, "words"


async def replied(client: openai.AsyncOpenAI, model: str, message: str, level: int) -> None:
    """Drafts the reply within the time of its level."""
    asked = client.with_options(default_headers=tidegate_client.headers(urgency=level, deadline_s=DEADLINE_S[level]))
    prompt = f"Write a short first reply to this message.\n{message}"
    await asked.chat.completions.create(model=model, messages=[{"role": "user", "content": prompt}], max_tokens=120)


async def triaged(options: argparse.Namespace) -> int:
    late = 0
    headers = tidegate_client.headers(tenant=options.tenant)
    async with openai.AsyncOpenAI(base_url=f"{options.url}/v1", api_key=options.key, default_headers=headers) as client:
        model = options.model or (await client.models.list()).data[0].id
        ratings = await asyncio.gather(*(rated(client, model, message) for message in MESSAGES))

        async def reply(message: str, level: int, by: str) -> None:
            nonlocal late
            began_s = time.monotonic()
            await replied(client, model, message, level)
            took_s = time.monotonic() - began_s
            late += took_s > DEADLINE_S[level]
            print(f"urgency {level} (by {by}): {took_s:5.2f} s of {DEADLINE_S[level]:2.0f} s  {message}")

        await asyncio.gather(*(reply(text, *rating) for text, rating in zip(MESSAGES, ratings, strict=True)))
    print(f"{len(MESSAGES)} replies, {late} late")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Replies to messages by their urgency.")
    parser.add_argument(
        "--url", default="http://127.0.0.1:8000", help="the gateway, without /v1 (default: %(default)s)"
    )
    parser.add_argument("--key", default="none", help="API key, if the gateway has keys")
    parser.add_argument("--model", help="default: the first model of the gateway")
    parser.add_argument("--tenant", help="its entitlement limits the most urgent level (docs/settings.md)")
    return asyncio.run(triaged(parser.parse_args()))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except openai.APIConnectionError as error:
        where = f"no gateway answers at {error.request.url} ({error})"
        sys.exit(f"triage.py: {where}; start one (tidegate up) or give its address by --url")
    except openai.APIError as error:
        sys.exit(f"triage.py: {error}")
