"""The sources of modules in which each dataclass has its `__init__` written out, so that mypyc compiles it.

A dataclass makes its `__init__` at run time, as Python. In a compiled class it takes 0.2 us for each field, and a call of
the gateway makes some twenty-five such values. A compiled `__init__` of six fields takes 0.06 us in place of 1.3. The
constructor stands on the blank line behind its class, so all other lines keep their numbers in tracebacks.
"""

import ast
import pathlib
from collections.abc import Mapping


def written(sources: Mapping[pathlib.Path, str]) -> dict[pathlib.Path, str]:
    """The sources with the constructors. Classes that inherit fields, and those whose fields are inherited, keep theirs."""
    trees = {path: ast.parse(source) for path, source in sources.items()}
    inherited = {ast.unparse(base).rpartition(".")[2] for tree in trees.values() for base in _bases(tree)}
    return {path: _written(sources[path], tree, inherited) for path, tree in trees.items()}


def _bases(tree: ast.Module) -> list[ast.expr]:
    return [base for node in tree.body if isinstance(node, ast.ClassDef) for base in node.bases]


def _written(source: str, tree: ast.Module, inherited: set[str]) -> str:
    lines = source.split("\n")
    for node in tree.body:
        options = _options(node)
        if not isinstance(node, ast.ClassDef) or options is None or node.bases or node.name in inherited:
            continue
        if any(isinstance(each, ast.FunctionDef) and each.name == "__post_init__" for each in node.body):
            raise ValueError(f"line {node.lineno}: the class {node.name} must have no __post_init__")
        if lines[node.end_lineno or 0].strip():
            raise ValueError(f"line {node.end_lineno}: a blank line must follow the class {node.name}")
        lines[node.end_lineno or 0] = "    " + _constructor(node, options)
    return "\n".join(lines)


def _options(node: ast.stmt) -> dict[str, bool] | None:
    """The options of `@dataclass(...)` or `@immutable.value(...)`; None for anything else."""
    for decorator in node.decorator_list if isinstance(node, ast.ClassDef) else ():
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) in ("dataclass", "immutable.value"):
            return {str(each.arg): bool(ast.literal_eval(each.value)) for each in decorator.keywords}
    return None


def _constructor(node: ast.ClassDef, options: dict[str, bool]) -> str:
    needed, optional, body = [], [], []
    for field in node.body:
        if not isinstance(field, ast.AnnAssign):
            continue
        name, kind, value = ast.unparse(field.target), ast.unparse(field.annotation), field.value
        factory = _factory(value)
        if value is None:
            needed.append(f"{name}: {kind}")
        elif factory is None:
            optional.append(f"{name}: {kind} = {ast.unparse(value)}")
        else:
            optional.append(f"{name}: {kind} | None = None")
        body.append(f"self.{name} = {name if factory is None else f'{factory}() if {name} is None else {name}'}")
    only_named = ["*"] if options.get("kw_only") else []
    frozen = "  # type: ignore[misc]" if options.get("frozen") else ""
    return f"def __init__({', '.join(['self', *only_named, *needed, *optional])}) -> None: {'; '.join(body)}{frozen}"


def _factory(value: ast.expr | None) -> str | None:
    """What `field(default_factory=...)` calls."""
    if isinstance(value, ast.Call) and ast.unparse(value.func) == "field":
        (keyword,) = value.keywords
        if keyword.arg == "default_factory":
            return ast.unparse(keyword.value)
        raise ValueError(f"line {value.lineno}: a field has a default_factory, or its default as it is")
    return None
