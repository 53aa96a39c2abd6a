"""What the compiler does not put together by itself in a layer's decode step, put together before it begins.

Both are found in the graph of operations, not by the names of a model's parts: where the graph is another, nothing
is changed.

- Query and key are rotated by the attention kernel as it loads them: two launches less.
- The product at the end of a layer is added to the residual in place, and the residual written out together with its
  norm: one launch less.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, Node

from rloom.generation.native import attention as attending  # whose operators are put into graphs

aten = torch.ops.aten
convert = torch.ops.prims.convert_element_type.default
RESHAPES = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)


class Fusing(CustomGraphPass):
    """For `torch.compile(…, options={"post_grad_custom_pre_pass": Fusing()})`."""

    def __call__(self, graph: Graph) -> None:
        for node in list(graph.nodes):
            if node.target is torch.ops.rloom.native_decode.default:
                rotate_inside(graph, node)
            elif node.target is aten.add.Tensor:
                add_in_place(graph, node)

    def uuid(self) -> bytes:
        """Compiled code is kept between runs: not beyond a change of what is put into it, here or there."""
        return get_hash_for_files((__file__, attending.__file__))


# -- rotation


def rotate_inside(graph: Graph, attention: Node) -> None:
    """native_decode(rotated q, rotated k, …) → native_decode_rotating(q, k, …, cos, sin, …)"""
    query, key, value, *options = attention.args
    of_query, of_key = _rotation(query), _rotation(key)
    if of_query is None or of_key is None or of_query[1:] != of_key[1:]:
        return
    (q, cos, sin), k = of_query, of_key[0]
    with graph.inserting_before(attention):
        new = graph.call_function(torch.ops.rloom.native_decode_rotating.default, (q, k, value, cos, sin, *options))
    new.meta["val"] = attention.meta["val"]  # and nothing else, of which some is about the arguments
    attention.replace_all_uses_with(new)
    graph.erase_node(attention)
    graph.eliminate_dead_code()


def _rotation(node: Any) -> tuple[Any, Any, Any] | None:
    """(x, cos, sin) of x · cos + [−second half, first half] · sin, angles as (B, 1, D); None: it is something else."""
    for plain, crossed in _sides(node, aten.add.Tensor):
        for x, cos in _sides(plain, aten.mul.Tensor):
            for halves, sin in _sides(crossed, aten.mul.Tensor):
                if _is_crossed(halves, x) and _is_angles(cos, x) and _is_angles(sin, x):
                    return x, cos.args[0], sin.args[0]
    return None


def _sides(node: Any, operation: Any) -> list[tuple[Any, Any]]:
    """The two arguments of an operation in either order; nothing for other nodes, scalars and factors."""
    if not _is(node, operation) or len(node.args) != 2:
        return []
    a, b = node.args
    return [(a, b), (b, a)] if isinstance(a, Node) and isinstance(b, Node) else []


def _is_crossed(node: Any, x: Any) -> bool:
    """cat([−x[..., D/2:], x[..., :D/2]])"""
    shape = _kind(x)[0]
    width = shape[-1] if len(shape) == 4 else None
    if not _is(node, aten.cat.default) or not isinstance(width, int) or width % 2:
        return False
    parts, axis = node.args[0], node.args[1] if len(node.args) > 1 else 0
    if axis not in (-1, 3) or len(parts) != 2 or not _is(parts[0], aten.neg.default):
        return False
    return _is_slice(parts[0].args[0], x, width // 2, width) and _is_slice(parts[1], x, 0, width // 2)


def _is_slice(node: Any, x: Node, start: int, end: int) -> bool:
    if not _is(node, aten.slice.Tensor) or len(node.args) != 4 or node.args[0] is not x or node.args[1] not in (-1, 3):
        return False
    _, _, begins, ends = node.args
    return isinstance(ends, int) and begins == start and min(ends, x.meta["val"].shape[-1]) == end


def _is_angles(node: Any, x: Any) -> bool:
    """(B, 1, D) with an axis for heads, of the same kind of number."""
    if not _is(node, aten.unsqueeze.default) or node.args[1] not in (1, -3):
        return False
    value, angles = x.meta["val"], node.args[0].meta["val"]
    rows, _, tokens, width = value.shape
    return angles.dtype == value.dtype and tokens == 1 and tuple(angles.shape) == (rows, 1, width)


# -- residual


def add_in_place(graph: Graph, addition: Node) -> None:
    """total + (x · weight), the layer's result → the product added where the total lies.

    The total then has to be written out before, which the compiler would not have done: that is made one operation
    with the norm that reads it, or nothing would be gained.
    """
    if any(user.op != "output" for user in addition.users):
        return  # the compiler makes it part of the operation that reads it
    for total, seen in _sides(addition, aten.add.Tensor):
        product: Any = seen.args[0] if seen.target in RESHAPES and len(seen.users) == 1 else None
        if not _is(product, aten.mm.default) or len(product.users) > 1:
            continue
        if _kind(total) != _kind(addition) or _kind(seen) != _kind(total):
            continue  # one row is added to all, say
        norm = _norm_of(total, addition)
        if norm is None:
            continue
        made = _make_total(graph, total, norm)
        width = product.meta["val"].shape[-1]
        with graph.inserting_before(addition):
            flat = graph.call_function(aten.view.default, (made, [-1, width]))
            flat.meta["val"] = made.meta["val"].reshape(-1, width)
            graph.call_function(torch.ops.rloom.add_product_.default, (flat, *product.args))
        addition.replace_all_uses_with(made)
        for node in (addition, seen, product):
            graph.erase_node(node)
        graph.eliminate_dead_code()
        return


def _is(node: Any, operation: Any) -> bool:
    return isinstance(node, Node) and node.target is operation and not node.kwargs


def _is_input(node: Any) -> bool:
    """Whether it is there from the beginning."""
    return isinstance(node, Node) and node.op in ("placeholder", "get_attr")


def _kind(node: Node) -> tuple[tuple[Any, ...], Any]:
    """Shape and kind of number; of numbers that are no tensors: none."""
    value = node.meta["val"]
    return (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else ((), None)


def _is_step(node: Any) -> bool:
    """(B, 1, N): one token of each row."""
    value = node.meta["val"]
    return value.dim() == 3 and value.shape[1] == 1


def _norm_of(total: Any, addition: Node) -> tuple[Any, Any, Any] | None:
    """(norm, its weight, ε) if the total is a sum of two that only this norm reads, apart from the layer's result."""
    if not _is(total, aten.add.Tensor) or len(total.users) != 2 or not _is_step(total):
        return None
    if _kind(total)[1] not in (torch.float16, torch.bfloat16):
        return None  # the kernel adds in float32
    if any(not isinstance(x, Node) or _kind(x) != _kind(total) for x in total.args):
        return None
    exact = next(user for user in total.users if user is not addition)
    if not _is(exact, convert) or exact.args[1] is not torch.float32 or len(exact.users) != 2:
        return None
    scaled = next((user for user in exact.users if _is(user, aten.mul.Tensor)), None)
    for x, factor in _sides(scaled, aten.mul.Tensor):
        epsilon = _epsilon(factor, exact) if x is exact else None
        if epsilon is not None and len(scaled.users) == 1:  # type: ignore[union-attr]
            rounded = next(iter(scaled.users))  # type: ignore[union-attr]
            if _is(rounded, convert) and rounded.args[1] is total.meta["val"].dtype and len(rounded.users) == 1:
                return _weighted(next(iter(rounded.users)), rounded, epsilon)
    return None


def _epsilon(factor: Any, x: Node) -> Any:
    """ε of 1 / √(mean(x²) + ε), or None."""
    inside: Any = factor.args[0] if _is(factor, aten.rsqrt.default) else None
    if not _is(inside, aten.add.Tensor):
        return None
    mean, epsilon = inside.args
    if not _is(mean, aten.mean.dim) or list(mean.args[1:]) != [[-1], True]:
        return None
    square = mean.args[0]
    if not _is(square, aten.pow.Tensor_Scalar) or square.args[0] is not x or square.args[1] != 2:
        return None
    while _is(epsilon, convert):  # the compiler takes numbers of a model as tensors, on the CPU
        epsilon = epsilon.args[0]
    if isinstance(epsilon, float):
        return epsilon
    if not _is_input(epsilon) or not isinstance(epsilon.meta["val"], Tensor):
        return None
    return epsilon if epsilon.meta["val"].device.type == "cpu" and not epsilon.meta["val"].dim() else None


def _weighted(norm: Any, rounded: Node, epsilon: Any) -> tuple[Any, Any, Any] | None:
    for x, weight in _sides(norm, aten.mul.Tensor):
        fits = _kind(weight) == (_kind(x)[0][-1:], _kind(x)[1])  # one number for all would be read beyond its end
        if x is rounded and fits and _is_input(weight) and weight.meta["val"].is_contiguous():
            return norm, weight, epsilon
    return None


def _make_total(graph: Graph, total: Any, norm: tuple[Any, Any, Any]) -> Node:
    """total and norm as one operation, which stands where the total stood."""
    normed, weight, epsilon = norm
    is_number = isinstance(epsilon, float)
    with graph.inserting_before(total):
        both = graph.call_function(
            torch.ops.rloom.add_norm.default,
            (*total.args, weight, None if is_number else epsilon, epsilon if is_number else 0.0),
        )
        both.meta["val"] = (total.meta["val"], normed.meta["val"])
        made, result = (graph.call_function(operator.getitem, (both, i)) for i in (0, 1))
    made.meta["val"], result.meta["val"] = both.meta["val"]
    normed.replace_all_uses_with(result)
    total.replace_all_uses_with(made, delete_user_cb=lambda user: user.target is not convert)
    return made


def _add_product(total: Tensor, x: Tensor, weight: Tensor) -> None:
    total.addmm_(x, weight)


def _add_norm(a: Tensor, b: Tensor, weight: Tensor, epsilon: Tensor | None, constant: float) -> tuple[Tensor, Tensor]:
    from rloom.generation.native.norm_kernels import add_norm

    return add_norm(a, b, weight, constant if epsilon is None else float(epsilon))


_library = torch.library.Library("rloom", "FRAGMENT")
_library.define("add_product_(Tensor(a!) total, Tensor x, Tensor weight) -> ()")
_library.define("add_norm(Tensor a, Tensor b, Tensor weight, Tensor? epsilon, float constant) -> (Tensor, Tensor)")
for _device in ("CUDA", "CPU"):
    _library.impl("add_product_", _add_product, _device)
    _library.impl("add_norm", _add_norm, _device)
torch.library.register_fake("rloom::add_product_", lambda total, x, weight: None)
torch.library.register_fake("rloom::add_norm", lambda a, *others: (a.new_empty(a.shape), a.new_empty(a.shape)))
