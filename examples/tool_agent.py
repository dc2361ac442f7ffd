"""An agent that calls tools: the model chooses a tool, the program runs it, and the model goes on with the result.

    python examples/tool_agent.py "What is 17.5% of 240 euros in yen?"

All calls are one session, so engines can keep its context, and one workflow, so the deadline covers the tools too. The
first turn must call a tool. Near the deadline the agent forbids tools and asks for the answer.
"""

import argparse
import ast
import json
import operator
import sys
import uuid
from typing import Any

import openai

import tidegate_client

RATES = {"EUR": 1.0, "USD": 1.08, "JPY": 163.2}
OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def calculate(expression: str) -> float:
    """The value of a sum or product of numbers."""

    def value(node: ast.AST) -> float:
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
            return float(OPERATIONS[type(node.op)](value(node.left), value(node.right)))
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            return float(node.value)
        raise ValueError("only numbers and + - * / are permitted")

    return value(ast.parse(expression, mode="eval").body)


def convert(amount: float, source: str, target: str) -> float:
    """An amount of money in another currency."""
    return amount / RATES[source] * RATES[target]


def tool(name: str, description: str, **properties: dict[str, Any]) -> Any:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


CURRENCY = {"type": "string", "enum": list(RATES)}
FUNCTIONS = {"calculate": calculate, "convert": convert}
TOOLS = [
    tool("calculate", "Adds, subtracts, multiplies and divides numbers.", expression={"type": "string"}),
    tool("convert", "Converts money.", amount={"type": "number"}, source=CURRENCY, target=CURRENCY),
]


def used(call: Any) -> str:
    """The result of a tool as text. A mistake of the model is a result too, so that it can correct itself."""
    try:
        return json.dumps(FUNCTIONS[call.function.name](**json.loads(call.function.arguments)))
    except (ValueError, KeyError, TypeError, SyntaxError, ZeroDivisionError) as error:
        return f"error: {error!r}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Answers a question with tools.")
    parser.add_argument("question", nargs="?", default="What is 17.5% of 240 euros in yen?")
    parser.add_argument(
        "--url", default="http://127.0.0.1:8000", help="the gateway, without /v1 (default: %(default)s)"
    )
    parser.add_argument("--key", default="none", help="API key, if the gateway has keys")
    parser.add_argument("--model", help="default: the first model of the gateway")
    parser.add_argument("--deadline-s", type=float, default=30.0)
    parser.add_argument("--turns", type=int, default=6, help="at most")
    options = parser.parse_args()
    messages: list[Any] = [{"role": "user", "content": options.question}]
    with openai.OpenAI(base_url=f"{options.url}/v1", api_key=options.key) as client:
        model = options.model or client.models.list().data[0].id
        session = f"agent-{uuid.uuid4().hex[:8]}"
        with tidegate_client.Workflow(client, deadline_s=options.deadline_s, session=session) as flow:
            for turn in range(options.turns):
                last = turn == options.turns - 1 or flow.left_s < options.deadline_s / 4
                choice: Any = "none" if last else "auto" if turn else "required"
                answer = flow.stage("think").chat.completions.create(
                    model=model, messages=messages, tools=TOOLS, tool_choice=choice, max_tokens=96
                )
                message = answer.choices[0].message
                messages.append(message.model_dump(exclude_none=True))
                if not message.tool_calls:
                    break
                for call in message.tool_calls:
                    result = used(call)
                    print(f"{call.function.name}({call.function.arguments}) -> {result}")  # type: ignore[union-attr]
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    print(f"Answer: {message.content}\nWorkflow {flow.id}: {flow.outcome}, {flow.record.left_ms} ms left")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except openai.APIConnectionError as error:
        where = f"no gateway answers at {error.request.url} ({error})"
        sys.exit(f"tool_agent.py: {where}; start one (tidegate up) or give its address by --url")
    except openai.APIError as error:
        sys.exit(f"tool_agent.py: {error}")
