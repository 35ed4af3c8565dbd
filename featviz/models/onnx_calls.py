"""Which calls of modules a graph of ONNX stands for.

A graph is a list of nodes. Both exporters of torch keep in each node in which module it
was made, so the modules come back, in the order in which they ran:

    node                        modules around it                call
    Conv                        layer1, layer1.0, layer1.0.bn1   layer1.0.bn1
    Relu                        layer1, layer1.0, layer1.0.relu  layer1.0.relu
    Conv                        layer1, layer1.0, layer1.0.bn2   layer1.0.bn2
    Add                         layer1, layer1.0                 layer1.0/Add
    Relu                        layer1, layer1.0, layer1.0.relu  layer1.0.relu, 2nd call
                                                                 layer1.0, whose value this is

torch.onnx.export(dynamo=True) writes them into `pkg.torch.onnx.name_scopes`, the older
exporter into the node's name (`/layer1/layer1.0/conv1/Conv`). A convolution with its
BatchNorm folded in has the name of the norm, whose output it computes, in the first, and
its own in the second. Other tools write only nodes: then a node's name is the layer's.

A module has a value if its nodes follow one another and a single value leaves them. That
value is what the module returned, whatever it did inside."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

_SCOPES = "pkg.torch.onnx.name_scopes"
_CLASSES = "pkg.torch.onnx.class_hierarchy"
_LONGEST = 20_000
"""How many letters of the text of one of these two entries are read; the deepest of known
models have 400."""

_DEEPEST = 60
"""How deep modules may lie inside one another; a deeper name is not taken for a module's."""

_QUANTISE = "QuantizeLinear"
_DEQUANTISE = "DequantizeLinear"
_SHAPES = ("Shape", "Size")
_KEEPS_SOURCE = (_DEQUANTISE, "Transpose", "Cast", "Identity")
"""Operators whose output is their first input in another form."""
_RANDOM = ("RandomNormal", "RandomUniform", "Bernoulli", "Multinomial")

MODULE = "Module"
"""Stands for the class of a module if the file does not say it."""


@dataclass
class LayerCall:
    """One call of a layer: a node, or a module with the calls inside it."""

    name: str
    """Qualified: `layer1.0.relu`, `layer1.0/Add`."""
    type: str
    """The node's operator, or the module's class."""
    inputs: tuple[str, ...] = ()
    """Names of the values that it takes, without constants."""
    outputs: tuple[str, ...] = ()
    """Names of the values that it returns; empty for a module if the file does not show
    which value it returned."""
    inner: list[LayerCall] = field(default_factory=list)
    node: Any = None
    """The NodeProto; None for a module."""


class GraphValues(NamedTuple):
    """What is known of the values of a graph, by name."""

    constants: Mapping[str, str]
    """For each value that does not depend on the graph's inputs: the name of the
    initializer that it is a form of (transposed, cast, quantised); empty if it is computed
    in another way."""
    stand_in: Mapping[str, str]
    """For each value that the model uses only in its quantised form: the name of the output
    of DequantizeLinear, which the model computes with instead."""
    origin: Mapping[str, str]
    """For each output of such a QuantizeLinear or DequantizeLinear: the name of the value
    that was quantised."""


class ScopedNode(NamedTuple):
    """A node and the modules around it."""

    proto: Any
    """The NodeProto."""
    modules: tuple[str, ...] | None
    """Their qualified names, the innermost last; empty for a node of the model itself, None
    if the file does not say it."""
    inputs: tuple[str, ...]
    """Names of the values that the node takes, without weights and other constants. An
    optional input that the node does not use is left out."""
    outputs: tuple[str, ...]


def layer_calls(graph: Any) -> tuple[list[LayerCall], GraphValues]:
    """The calls of a graph in the order of its nodes, which is that of a forward pass:
    ONNX wants a node behind those whose values it takes.

    Left out are constants, the arithmetic of shapes, and the nodes that quantise.

    Args:
        graph: The GraphProto, in which local functions are inlined and which ONNX Runtime
            has accepted.

    Returns:
        The outermost calls, with those inside them, and what is known of the values.
    """
    values = _read_values(graph)
    classes: dict[str, str] = {}
    paths = _old_paths(graph.node)
    scoped_nodes = []
    for node, path in zip(graph.node, paths, strict=True):
        outputs = tuple(name for name in node.output if name)
        is_left_out = node.op_type in (_QUANTISE, _DEQUANTISE) or any(
            name in values.constants for name in outputs
        )
        if not outputs or is_left_out:
            continue
        inputs = _inputs_of(node, values)
        scopes = _scopes(node, classes)
        modules = path if scopes is None else scopes
        # so deep a name is no module's, and a tree of so many containers ends in errors
        if modules and any(name.count(".") > _DEEPEST for name in modules):
            modules = None
        scoped_nodes.append(ScopedNode(node, modules, inputs, outputs))
    return _CallBuilder(graph, scoped_nodes, values, classes).calls(), values


def _inputs_of(node: Any, values: GraphValues) -> tuple[str, ...]:
    """The names of the values that a node takes, for `ScopedNode.inputs`. A value has
    another name before, between and behind QuantizeLinear and DequantizeLinear; here the
    last of these names stands for all."""
    inputs = []
    for name in node.input:
        if name and name not in values.constants:
            origin = values.origin.get(name, name)
            inputs.append(values.stand_in.get(origin, name))
    return tuple(inputs)


# Values


def _read_values(graph: Any) -> GraphValues:
    """Follow constants and quantised values through the nodes."""
    constants = {tensor.name: tensor.name for tensor in graph.initializer}
    constants |= {sparse.values.name: "" for sparse in graph.sparse_initializer}
    for node in graph.node:
        if not _is_constant(node, constants) and node.op_type not in _SHAPES:
            continue
        # Weights that are only quantised or transposed are still those of their
        # initializer. Shape and Size do not depend on the image, but on its size.
        source = ""
        if node.op_type in _KEEPS_SOURCE:
            source = constants.get(node.input[0], "")
        constants |= dict.fromkeys(node.output, source)
    return _with_quantised(graph, constants)


def _with_quantised(graph: Any, constants: Mapping[str, str]) -> GraphValues:
    """Find the values that the model uses only in their quantised form: each is the input
    of one QuantizeLinear, and all other nodes take it from a DequantizeLinear behind that.
    Several DequantizeLinear return the same values; the first stands for all.

        Conv ── value ──► QuantizeLinear ── integers ──► DequantizeLinear ── stand-in ──► Relu

    Args:
        graph: The GraphProto.
        constants: `GraphValues.constants`; these values get no stand-in.

    Returns:
        All that is known of the values, including `constants`.
    """
    users = defaultdict[str, list[Any]](list)
    for node in graph.node:
        for name in node.input:
            users[name].append(node)
    outputs = {output.name for output in graph.output}
    stand_in = {}
    origin = {}
    for node in graph.node:
        if node.op_type != _QUANTISE:
            continue
        value = node.input[0]
        quantised = node.output[0]
        is_used_itself = len(users[value]) > 1 or value in outputs or value in constants
        operators = {user.op_type for user in users[quantised]}
        # integers that an operator takes as they are (QLinearConv) are values that count
        if is_used_itself or operators != {_DEQUANTISE}:
            continue
        stand_in[value] = users[quantised][0].output[0]
        origin[quantised] = value
        origin.update((user.output[0], value) for user in users[quantised])
    return GraphValues(constants, stand_in, origin)


def _is_constant(node: Any, constants: Collection[str]) -> bool:
    """Whether the outputs of a node are the same for all inputs of the graph.

    Args:
        node: The NodeProto.
        constants: Names of the values that are known to be constant.
    """
    # a node with a graph inside may take values that are not among its inputs
    if node.op_type in _RANDOM or any(attribute.g.node for attribute in node.attribute):
        return False
    return all(name in constants for name in node.input if name)


# Modules


def _scopes(node: Any, classes: dict[str, str]) -> tuple[str, ...] | None:
    """Names of the modules around a node, the outermost first, from the metadata that
    torch.onnx.export(dynamo=True) writes; None for a file without it.

    Args:
        node: The NodeProto.
        classes: This mapping from names to classes is changed: each of these modules is
            added to it.
    """
    metadata = {entry.key: entry.value for entry in node.metadata_props}
    scopes = _list_of_names(metadata.get(_SCOPES, ""))
    if not scopes:
        return None
    class_names = _list_of_names(metadata.get(_CLASSES, ""))
    if len(class_names) == len(scopes):
        for scope, class_name in zip(scopes[:-1], class_names[:-1], strict=True):
            classes.setdefault(scope, class_name.rpartition(".")[2])
    return tuple(scope for scope in scopes[:-1] if scope)  # the last one is the node's


def _list_of_names(text: str) -> list[str]:
    """The names in the text of a list as Python writes it, `['a', 'b']`; empty if there
    are more than _DEEPEST."""
    names = re.findall("'([^']*)'", text[:_LONGEST])
    return names if len(names) <= _DEEPEST else []


def _old_paths(nodes: Sequence[Any]) -> list[tuple[str, ...] | None]:
    """The modules around each node, by the names of torch's older exporter.

    The name of a node joins the names of all modules around it and its operator:
    /layer1/layer1.0/conv1/Conv. The name of a module is that of an attribute of the module
    before it; a member of an nn.Sequential repeats the name of the Sequential. At the
    second call of a module its name gets a number: relu_1.

    Returns:
        For each node the qualified names of its modules, the outermost first: `('layer1',
        'layer1.0', 'layer1.0.conv1')`. `()` for a node of the model itself, None for a node
        whose name has another form.
    """
    names_of_nodes = [_old_names(node) for node in nodes]
    # by the names of the modules around it: the names that occur inside each module
    siblings = defaultdict[tuple[str, ...], set[str]](set)
    for names in names_of_nodes:
        for depth, name in enumerate(names or ()):
            siblings[names[:depth]].add(name)  # type: ignore[index]
    return [
        None if names is None else _old_path(names, siblings)
        for names in names_of_nodes
    ]


def _old_path(
    names: tuple[str, ...], siblings: Mapping[tuple[str, ...], Collection[str]]
) -> tuple[str, ...]:
    """The qualified names of the modules around a node, the outermost first.

    Args:
        names: The names in the node's name, as `_old_names` returns them.
        siblings: For each beginning of such names, all names that follow it in the graph.
    """
    path: list[str] = []
    previous = ""
    for depth, name in enumerate(names):
        # relu_1 may also be the name of an attribute: it is the second call of relu only
        # if relu occurs in the same module
        uncounted_name = re.sub(r"_\d+$", "", name)
        if uncounted_name in siblings[names[:depth]]:
            name = uncounted_name
        if not path:
            path.append(name)
        elif name.startswith(f"{previous}."):
            path.append(path[-1] + name.removeprefix(previous))
        else:
            path.append(f"{path[-1]}.{name}")
        previous = name
    return tuple(path)


def _old_names(node: Any) -> tuple[str, ...] | None:
    """The names of modules in a node's name: `('layer1', 'layer1.0', 'conv1')`; None where
    the node's name has another form."""
    first, *names = node.name.split("/")
    if first or not names or len(names) > _DEEPEST or not all(names):
        return None
    # `Relu`, or of a second one in the same module `Relu_1`
    if names[-1].startswith(node.op_type):
        return tuple(names[:-1])
    return None


# Calls


class _CallBuilder:
    """Makes the calls of a graph out of its nodes."""

    def __init__(
        self,
        graph: Any,
        nodes: Sequence[ScopedNode],
        values: GraphValues,
        classes: Mapping[str, str],
    ) -> None:
        """Note which nodes take which value.

        Args:
            graph: The GraphProto.
            nodes: The nodes of the graph in their order, without those that make no call.
            values: What is known of the values of the graph.
            classes: The classes of modules, by the names of the modules; those that the
                file does not say are missing.
        """
        self.nodes = nodes
        self.values = values
        self.classes = classes
        self.graph_outputs = {
            values.origin.get(output.name, output.name) for output in graph.output
        }
        self.users = defaultdict[str, list[int]](list)
        """The indices in `nodes` of the nodes that take a value, by the name of the value."""
        for number, scoped in enumerate(nodes):
            for name in scoped.inputs:
                self.users[values.origin.get(name, name)].append(number)
        self.parents: set[str] = set()
        """Names of modules that have modules inside."""
        for scoped in nodes:
            self.parents.update((scoped.modules or ())[:-1])
        self.taken_names: set[str] = set()
        """The names that `_unique_name` has returned."""

    def calls(self) -> list[LayerCall]:
        """The outermost calls, with those inside them. Call it once: a second time the
        nodes without modules would get other names."""
        return list(self._calls_in(range(len(self.nodes)), 0))

    def _calls_in(self, stretch: range, depth: int) -> Iterator[LayerCall]:
        """The calls inside one call of a module: of the modules in it, and of its own
        nodes.

        Args:
            stretch: Indices of the call's nodes, which follow one another.
            depth: How many modules are around the call's own nodes: 0 for the model.
        """
        number = stretch.start
        while number in stretch:
            modules = self.nodes[number].modules
            if modules is None or len(modules) <= depth:
                yield self._node_call(number, modules)
                number += 1
                continue
            # consecutive nodes of the same module are one call of it; if nodes of other
            # modules stand between them, they are several calls
            end = number
            while end in stretch and self._is_in(end, modules[: depth + 1]):
                end += 1
            yield from self._module_call(range(number, end), depth)
            number = end

    def _is_in(self, number: int, modules: tuple[str, ...]) -> bool:
        """Whether a node was made in these modules, the outermost first."""
        return (self.nodes[number].modules or ())[: len(modules)] == modules

    def _module_call(self, stretch: range, depth: int) -> Iterator[LayerCall]:
        """The call of a module, to which all nodes of a stretch belong. For a module that
        has no modules inside, these are the calls of its nodes instead.

        Args:
            stretch: Indices of the call's nodes.
            depth: The module's index in `modules` of each of the nodes.
        """
        modules = self.nodes[stretch.start].modules or ()
        name = modules[depth]
        leaving = self._leaving_values(stretch)
        # if several values leave, the file does not show which of them the module returned
        maker = leaving[0] if len(leaving) == 1 else None
        # A module without modules is shown as its nodes. The node that makes its value gets
        # the module's name; the others (the MatMul of an nn.Linear with bias) get a name
        # with their operator.
        if name not in self.parents:
            for number in stretch:
                is_output = maker is not None and number == maker.number
                yield self._node_call(number, modules, name if is_output else None)
            return
        call = LayerCall(name, self.classes.get(name, MODULE))
        call.inner = list(self._calls_in(stretch, depth + 1))
        if maker is not None and not self._is_piece_of_call(
            stretch, maker, modules[: depth + 1]
        ):
            call.outputs = (self._stand_in(maker.value),)
            call.inputs = self._entering_values(stretch)
        yield call

    def _node_call(
        self, number: int, modules: tuple[str, ...] | None, name: str | None = None
    ) -> LayerCall:
        """The call of one node.

        Args:
            number: The index of the node in `self.nodes`.
            modules: The qualified names of the modules around the node, the innermost
                last; None if the file does not say them.
            name: The name of the layer. By default it is made of the innermost module and
                the operator (`layer1.0/Add`), or, if `modules` is None, of the node's name.
        """
        scoped = self.nodes[number]
        operator = scoped.proto.op_type
        if name is None and modules is None:
            name = self._unique_name(scoped.proto.name or scoped.outputs[0])
        elif name is None:
            name = "/".join((*modules[-1:], operator)) if modules else operator
        outputs = tuple(map(self._stand_in, scoped.outputs))
        return LayerCall(name, operator, scoped.inputs, outputs, node=scoped.proto)

    def _unique_name(self, name: str) -> str:
        """A qualified name that this method has not returned before.

        Args:
            name: The name of a node; its empty components are left out.
        """
        components = [component for component in name.split(".") if component]
        separator = "." if len(components) <= _DEEPEST else "_"
        name = separator.join(components) or "node"
        unique = name
        count = 1
        while unique in self.taken_names:
            unique = f"{name}_{count}"
            count += 1
        self.taken_names.add(unique)
        return unique

    def _stand_in(self, value: str) -> str:
        """The name by which nodes take a value: the name of its stand-in if it has one
        (see `GraphValues.stand_in`), else its own name."""
        return self.values.stand_in.get(value, value)

    def _leaving_values(self, stretch: range) -> list[_Maker]:
        """The values made in a stretch of nodes that nodes outside the stretch take, or that
        the graph returns."""
        leaving = []
        for number in stretch:
            for value in self.nodes[number].outputs:
                is_taken = any(user not in stretch for user in self.users[value])
                if is_taken or value in self.graph_outputs:
                    leaving.append(_Maker(number, value))
        return leaving

    def _is_piece_of_call(
        self, stretch: range, maker: _Maker, modules: tuple[str, ...]
    ) -> bool:
        """Whether a stretch is only a piece of a module's call: nodes of the same module
        that stand outside the stretch take its value.

        Args:
            stretch: Indices of nodes.
            maker: The node of the stretch that makes the value.
            modules: The modules around the stretch; the last is the module in question.
        """
        return any(
            number not in stretch and self._is_in(number, modules)
            for number in self.users[maker.value]
        )

    def _entering_values(self, stretch: range) -> tuple[str, ...]:
        """The names of the values that a stretch of nodes takes from outside."""
        made: set[str] = set()
        entering: dict[str, None] = {}
        for scoped in self.nodes[stretch.start : stretch.stop]:
            for name in scoped.inputs:
                if self.values.origin.get(name, name) not in made:
                    entering[name] = None
            made.update(scoped.outputs)
        return tuple(entering)


class _Maker(NamedTuple):
    """A node whose value is used outside of its module."""

    number: int
    """The index of the node in `_CallBuilder.nodes`."""
    value: str
    """The name of the value."""


def all_calls(calls: Collection[LayerCall]) -> Iterator[LayerCall]:
    """Calls and those inside them, the outer ones first."""
    for call in calls:
        yield call
        yield from all_calls(call.inner)
