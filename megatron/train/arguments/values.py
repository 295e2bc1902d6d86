"""Converters of one command-line word to a value that is not a plain int, float or str."""

from __future__ import annotations

import ast
import signal

Pattern = int | list[int]


def boolean(word: str) -> bool:
    """ "true" or "false" in the usual spellings."""
    lowered = word.strip().lower()
    if lowered in ("true", "1", "yes", "on"):
        return True
    if lowered in ("false", "0", "no", "off"):
        return False
    raise ValueError(f"{word!r} is not true or false")


def layer_pattern(word: str) -> Pattern:
    """An int N (one in N layers), or a list expression such as "([0]*3+[1]*58)" with one 0 or 1 per layer.

    Only lists, ints, + and * are allowed; nothing is evaluated as Python code.
    """
    if "[" not in word:
        return int(word)
    try:
        value = _list_expression(ast.parse(word.strip(), mode="eval").body)
    except (SyntaxError, TypeError) as error:
        raise ValueError(f"{word!r} is not a list expression such as '([0]*3+[1]*58)'") from error
    if not isinstance(value, list):
        raise ValueError(f"{word!r} does not give a list")
    return value


def _list_expression(node: ast.expr) -> int | list[int]:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return int(node.value)
    if isinstance(node, ast.List):
        items = [_list_expression(item) for item in node.elts]
        if all(isinstance(item, int) for item in items):
            return [int(item) for item in items if isinstance(item, int)]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mult):
        left, right = _list_expression(node.left), _list_expression(node.right)
        if isinstance(node.op, ast.Mult) and (isinstance(left, int) or isinstance(right, int)):
            result = left * right  # type: ignore[operator]
            if isinstance(result, list) and len(result) > 100_000:
                raise ValueError("a layer pattern of more than 100000 layers")
            return result
        if isinstance(node.op, ast.Add) and type(left) is type(right):
            return left + right  # type: ignore[operator]
    raise ValueError("only lists of ints, + and * may stand in a layer pattern")


def int_tuple(word: str) -> tuple[int, ...]:
    """ "4096,0" or "(4096,0)" to (4096, 0)."""
    return tuple(int(part) for part in word.strip().strip("()").split(",") if part.strip())


def signal_name(word: str) -> signal.Signals:
    """The name of a POSIX signal, such as SIGTERM."""
    try:
        return signal.Signals[word]
    except KeyError:
        raise ValueError(f"{word!r} is not a signal of this system") from None
