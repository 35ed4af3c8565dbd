"""A graph of ONNX as a model of torch whose layers take hooks.

Its modules compute nothing. The model's forward finds the modules that have hooks, lets
one session of ONNX Runtime compute the values that the hooks will see, and then calls
these modules in the order of the graph:

    forward(image) ── session: image in, hooked values out
                   ── layer1.0.bn1(x) ── its value ──► hooks
                   ── layer1.0.relu(x) ── its value ──► hooks
                   ── ...

So selectors, captures, layouts and listings see a model like any other. What goes back
through the layers, or changes what they return, is refused: no later node would see it."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache, partial
from keyword import iskeyword
from pathlib import Path
from threading import Timer
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from featviz.errors import LoadError, UsageError
from featviz.models import weights
from featviz.models.onnx_calls import GraphValues, LayerCall, all_calls, layer_calls
from featviz.models.onnx_file import all_nodes, read_graph, require_onnx
from featviz.models.preprocess import Chain
from featviz.models.sources import ANY_INPUT, FixedInput, Loaded
from featviz.text import by, first_line, quoted

RUNTIME = "ONNX Runtime"

_READABLE = re.compile(r"tensor\((float|double|float16|u?int\d+|bool)\)")
"""Types of values that ONNX Runtime returns as arrays; bfloat16 is not among them."""

MOST_SECONDS = 60.0
"""A graph with loops, which may be endless, is stopped after this time."""

_LOOPS = ("Loop", "Scan")

_NO_MEMORY = re.compile("Failed to allocate|Available memory|bad_alloc")
_PREFIX = re.compile(r"\[ONNXRuntimeError\] : \d+ : \w+ : |/onnxruntime_src/\S+ .*?\) ")
"""The beginnings of ONNX Runtime's messages: the kind of the error, and a place in its
code."""

_SESSIONS = 2
"""How many sessions are kept, each for one set of hooked layers: one for the first pass,
which finds the layers, and one for the run."""

_PICTURE_CHANNELS = (1, 3, 4)
"""The numbers of channels by which channels in the last axis are recognised."""

_PARAMETER_NAMES = {
    "Conv": ("weight", "bias"),
    "ConvTranspose": ("weight", "bias"),
    "Gemm": ("weight", "bias"),
    "MatMul": ("weight",),
    "PRelu": ("weight",),
    "LayerNormalization": ("weight", "bias"),
    "InstanceNormalization": ("weight", "bias"),
    "GroupNormalization": ("weight", "bias"),
    "BatchNormalization": ("weight", "bias", "running_mean", "running_var"),
}
"""torch's names of the constant inputs of operators: of the second input and those after
it."""
_MULTIPLIES = re.compile("Conv|Gemm|MatMul|Einsum|Attention|LSTM|GRU|RNN|Loop|Scan|If$")
"""Operators that multiply matrices, or may contain operators that do."""

_CHANNELS_FIRST = [
    "Conv",
    "ConvTranspose",
    "BatchNormalization",
    "InstanceNormalization",
    "GroupNormalization",
    "MaxPool",
    "AveragePool",
    "GlobalAveragePool",
    "GlobalMaxPool",
]
_KEEPS_AXES = [
    "Relu",
    "LeakyRelu",
    "PRelu",
    "Clip",
    "Sigmoid",
    "HardSigmoid",
    "HardSwish",
    "Tanh",
    "Elu",
    "Selu",
    "Celu",
    "Gelu",
    "Mish",
    "Softplus",
    "Erf",
    "Add",
    "Sub",
    "Mul",
    "Div",
    "Concat",
    "Resize",
    "Upsample",
    "Pad",
    "Dropout",
    "Identity",
    "Cast",
]
"""Operators whose outputs have the channels in the same axis as their inputs. Outputs of
_CHANNELS_FIRST have them in the second axis, behind the batch."""


class OnnxInput(NamedTuple):
    """An input of the graph."""

    name: str
    argument: str
    """The name of the argument of forward: `name`, in which an underscore replaces each
    character that Python does not allow."""
    dtype: torch.dtype
    shape: tuple[int | None, ...]
    """Its sizes; None for an axis that may have any size."""
    channels_last: bool
    """Whether the input is an image [N, H, W, C]."""

    @property
    def is_image(self) -> bool:
        """Whether the input is taken for a batch of images."""
        return len(self.shape) == 4

    @property
    def fixed(self) -> FixedInput:
        """The channels and the size of the images that the input takes, as far as the graph
        says them."""
        if not self.is_image:
            return ANY_INPUT
        _, channels, height, width = self.shape
        if self.channels_last:
            _, height, width, channels = self.shape
        if height is None or width is None:
            return FixedInput(channels)
        return FixedInput(channels, (height, width))

    @property
    def description(self) -> str:
        """The type and shape of the input, for people: `int64 1×?`."""
        sizes = ["?" if size is None else size for size in self.shape]
        return str(self.dtype).removeprefix("torch.") + " " + by(sizes)

    def feed(self, value: Any) -> np.ndarray:
        """A value as the array that the session takes for this input.

        Args:
            value: If the input is an image, a tensor [N, C, H, W]; if it takes integers,
                its floats 0..1 become levels 0..255. For another input any tensor, or a
                value of which torch can make one.
        """
        tensor = torch.as_tensor(value).detach().cpu()
        if self.channels_last and tensor.ndim == 4:
            tensor = tensor.permute(0, 2, 3, 1)
        takes_integers = not self.dtype.is_floating_point
        if takes_integers and self.is_image and tensor.is_floating_point():
            # levels 0..255, see `load_onnx`
            tensor = (tensor * 255).round().clamp(0, 255)
        array = tensor.to(self.dtype).contiguous().numpy()
        return array


class OnnxLayer(nn.Module):
    """A node of the graph, or a module that the graph was exported from."""

    computed_by = RUNTIME
    channel_order: Literal["first"] | None = None
    """`first` if its operator shows that its output is [N, C, ...]; else None."""
    operator = ""
    """The operator of its node; empty for a module."""
    body: Callable[[], Any] | None = None
    """Set only during a call of the layer: it calls the layers inside this one, and returns
    the layer's value."""

    def forward(self, *inputs: Tensor) -> Any:
        """The value that the session computed; None outside of a forward pass of the model.
        The inputs are not used: they are passed for the hooks."""
        return None if self.body is None else self.body()

    def macs(self, inputs: Sequence[Any], output: Any) -> int | None:
        """The number of multiply-accumulates of a call, as torch's FlopCounterMode counts
        them; None if it is not known.

        Args:
            inputs: The inputs of the call, without constants of the graph.
            output: The output of the call.
        """
        if not _MULTIPLIES.search(self.operator):
            return 0
        operands = [*inputs, *self.parameters(recurse=False)][:2]
        are_tensors = all(isinstance(value, Tensor) for value in (*operands, output))
        if len(operands) < 2 or not are_tensors:
            return None
        first, second = operands
        # The first filter, [1, C, h, w] of the weights. In Conv each value of the output
        # takes as many products; in ConvTranspose each value of the input does.
        filter_size = second[:1].numel()
        if self.operator == "Conv":
            return int(output.numel() * filter_size)
        if self.operator == "ConvTranspose":
            return int(first.numel() * filter_size)
        depth = first.shape[-1:]
        is_product = second.shape[-2:] == depth + output.shape[-1:]
        # a linear layer has its weight [N, K], and a product of matrices [K, N]
        is_linear = second.shape == output.shape[-1:] + depth
        if self.operator in ("Gemm", "MatMul") and (is_product or is_linear):
            return int(output.numel() * depth.numel())
        return None


class OnnxModel(nn.Module):
    """A graph, whose layers take hooks."""

    computed_by = RUNTIME

    def __init__(self, proto: Any, inputs: Sequence[OnnxInput]) -> None:
        """Make a model without layers; `load_onnx` adds them and the calls.

        Args:
            proto: The ModelProto, without external data.
            inputs: The inputs of the graph that have no default, in the graph's order.
        """
        super().__init__()
        self.content: bytes = proto.SerializeToString()
        self.inputs = inputs
        self.output_names = [output.name for output in proto.graph.output]
        self.has_loops = any(n.op_type in _LOOPS for n in all_nodes(proto.graph.node))
        self.calls: list[LayerCall] = []
        """The outermost calls, in the order of a forward pass."""
        self.layers: dict[str, OnnxLayer] = {}
        """The layers by qualified name; containers that are not called are left out."""
        # This dict is changed in place, never replaced: after each pass `kept_attributes`
        # puts back the attributes of modules.
        self._sessions: dict[int, dict[Any, Any]] = {}
        """The sessions, by the id of the process; then by the number of threads and the
        names of the values that they return."""

    def run(self, images: Sequence[Any], named: Mapping[str, Any]) -> Any:
        """Do a forward pass, in which the layers with hooks are called.

        Args:
            images: The positional arguments of forward, for the inputs that `named` lacks:
                first for the inputs that are images, then for the others, each in the
                graph's order.
            named: The keyword arguments of forward, by `OnnxInput.argument`.

        Returns:
            The graph's output: a tensor, or a dict by name if there are several.

        Raises:
            UsageError: Where an input has no argument.
            RuntimeError: Where the session fails, for example on an image of another size.
        """
        arguments = self._arguments(images, named)
        feeds = {item.name: item.feed(arguments[item.argument]) for item in self.inputs}
        values = self._compute(self._needed_values(), feeds)
        values |= {item.name: arguments[item.argument] for item in self.inputs}
        self._call_layers(self.calls, values)
        outputs = [values[name] for name in self.output_names]
        if len(outputs) == 1:
            return outputs[0]
        return dict(zip(map(_argument_name, self.output_names), outputs, strict=True))

    def _arguments(
        self, images: Sequence[Any], named: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The argument for each input, by `OnnxInput.argument`. Parameters and exceptions are
        those of `run`."""
        arguments = dict(named)
        # in the order of forward's arguments, see `_model_class`: images come first
        ordered = sorted(self.inputs, key=lambda item: not item.is_image)
        free = [item.argument for item in ordered if item.argument not in named]
        arguments |= dict(zip(free, images, strict=False))
        for item in self.inputs:
            if arguments.get(item.argument) is None:
                raise UsageError(
                    f"the graph also takes {quoted(item.name)}, {item.description}",
                    f"--forward-arg {item.argument}=VALUE",
                )
        return arguments

    def _needed_values(self) -> set[str]:
        """The names of the values that hooks will see, and of the graph's outputs."""
        needed = {*self.output_names}
        for call in all_calls(self.calls):
            module = self.layers[call.name]
            if call.outputs and _is_hooked(module):
                needed.update(call.outputs)
                if module._forward_pre_hooks:
                    needed.update(call.inputs)
        return needed

    def _call_layers(
        self, calls: Sequence[LayerCall], values: Mapping[str, Any]
    ) -> None:
        """Call the layers that have hooks.

        Args:
            calls: Calls in the order of a forward pass. Calls inside them are made, too.
            values: All values of `_needed_values`, by name.
        """
        for call in calls:
            module = self.layers[call.name]
            if not call.outputs or not _is_hooked(module):
                self._call_layers(call.inner, values)
                continue
            inputs = call.inputs if module._forward_pre_hooks else ()
            arguments = [values[name] for name in inputs]
            # The order is that of a module that computes: pre-hooks see the inputs, the
            # calls inside are made, hooks see the outputs.
            # `vars` is used since a file may have a module called `body` in this layer, which
            # nn.Module would refuse to replace.
            vars(module)["body"] = partial(self._layer_value, call, values)
            try:
                module(*arguments)
            finally:
                vars(module)["body"] = None

    def _layer_value(self, call: LayerCall, values: Mapping[str, Any]) -> Any:
        """`OnnxLayer.body` for a call: make the calls inside it, and return its value; a
        tuple if it has several."""
        self._call_layers(call.inner, values)
        outputs = [values[name] for name in call.outputs]
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def _compute(
        self, names: Collection[str], feeds: Mapping[str, np.ndarray]
    ) -> dict[str, Any]:
        """Compute values of the graph, and return them by name, as tensors. A value whose
        type is not _READABLE is None.

        Args:
            names: The names of the values.
            feeds: The arrays of the inputs, by name.

        Raises:
            RuntimeError: Where the session fails, or a graph with loops takes longer than
                MOST_SECONDS.
        """
        import onnxruntime

        session = self.session(names)
        fetched = []
        for output in session.get_outputs():
            if output.name in names and _READABLE.fullmatch(output.type):
                fetched.append(output.name)
        values = dict.fromkeys(names)
        # to ONNX Runtime an empty list means all outputs
        if not fetched:
            return values
        # a session can only be interrupted by another thread, through its options
        options = onnxruntime.RunOptions()
        watchdog = Timer(MOST_SECONDS, setattr, (options, "terminate", True))
        watchdog.daemon = True
        try:
            if self.has_loops:
                watchdog.start()
            arrays = session.run(fetched, feeds, options)
        except Exception as error:  # of ONNX Runtime's own classes
            raise RuntimeError(_reason(error)) from error
        finally:
            watchdog.cancel()
        values |= zip(fetched, map(torch.from_numpy, arrays), strict=True)
        return values

    def session(self, names: Collection[str] = ()) -> Any:
        """A session of ONNX Runtime that returns further values besides the graph's outputs.
        Sessions are kept: the same names give the same session again.

        Args:
            names: The names of the values. Names of inputs and outputs have no effect.

        Raises:
            Exception: Of ONNX Runtime's classes, where it cannot run the graph.
        """
        # After a fork, sessions of the parent process are neither used nor ended: the end
        # of a session waits for its threads, which a fork does not copy.
        sessions = self._sessions.setdefault(os.getpid(), {})
        threads = torch.get_num_threads()
        key = threads, frozenset(names)
        if key in sessions:
            return sessions[key]
        import onnx
        import onnxruntime

        # ONNX Runtime merges nodes, and the values between them are gone. Outputs of the
        # graph are kept, so the values are made outputs.
        fragment = onnx.ModelProto()
        input_names = {item.name for item in self.inputs}
        for name in sorted(set(names) - set(self.output_names) - input_names):
            fragment.graph.output.append(onnx.ValueInfoProto(name=name))
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 4  # errors are raised; stderr is featviz's own
        # threads that wait busily would take the cores of those that draw
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        if _limit_memory():
            options.add_session_config_entry("session.use_env_allocators", "1")
        # each session has its own copy of the weights, so the oldest is dropped
        while len(sessions) >= _SESSIONS:
            del sessions[next(iter(sessions))]
        # protobuf merges two messages whose bytes follow one another; so the outputs are
        # added without parsing a copy of the weights
        sessions[key] = onnxruntime.InferenceSession(
            self.content + fragment.SerializeToString(),
            options,
            providers=["CPUExecutionProvider"],
        )
        return sessions[key]


@lru_cache(maxsize=1)
def _limit_memory() -> bool:
    """Register an allocator that gives all sessions of this process at most half of the
    machine's memory. A graph can ask for any amount, and the system would kill a process
    that takes more than there is. The allocator may be registered only once, so the result
    is cached.

    Returns:
        True if sessions can use the allocator; False on a system (Windows) that does not
        tell how much memory it has.
    """
    if not hasattr(os, "sysconf"):
        return False
    import onnxruntime as runtime

    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    default = -1
    arena = runtime.OrtArenaCfg(memory // 2, default, default, default)
    info = runtime.OrtMemoryInfo(
        "Cpu",
        runtime.OrtAllocatorType.ORT_ARENA_ALLOCATOR,
        0,
        runtime.OrtMemType.DEFAULT,
    )
    runtime.create_and_register_allocator(info, arena)
    return True


def _reason(error: Exception) -> str:
    """The message of an error of ONNX Runtime on one line, without the error's code and its
    place in the source."""
    text = first_line(error)
    if _NO_MEMORY.search(text):
        return "an operator needs more memory than there is"
    return quoted(_PREFIX.sub("", text))


def _is_hooked(module: nn.Module) -> bool:
    """Whether a module has forward hooks or forward-pre-hooks."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


# From a file to a model


def load_onnx(path: Path) -> Loaded:
    """Load a model from a file of ONNX.

    Raises:
        LoadError: Where a package is missing, the file is no model or could do harm, or
            ONNX Runtime cannot run it.
    """
    require_onnx(path.name)
    proto = read_graph(path)
    graph = proto.graph
    inputs = _inputs(graph, path.name)
    model = _model_class(inputs)(proto, inputs)
    try:
        model.session()
    except Exception as error:  # of ONNX Runtime's own classes, which share no base
        raise LoadError(
            f"{path.name}: {RUNTIME} cannot run it: {_reason(error)}",
            "export it again, or update onnxruntime",
        ) from error
    model.calls, values = layer_calls(graph)
    _add_layers(model, values, {tensor.name: tensor for tensor in graph.initializer})
    record = {"kind": "file", **weights.file_record(path), "runtime": RUNTIME}
    images = [item for item in inputs if item.is_image]
    image = images[0] if images else inputs[0]
    entry = None
    fixed = image.fixed
    # A graph that takes integers normalises them itself, and wants levels 0..255. The chain
    # gives 0..1, of which `OnnxInput.feed` makes levels.
    if not image.dtype.is_floating_point:
        entry = Chain(fixed.size, channels=fixed.channels or 3)
    return Loaded(model, record, entry, fixed)


def _argument_name(name: str) -> str:
    """The name of a value, changed to one that Python allows for an argument: `x.1` becomes
    `x_1`, and `in` becomes `_in`."""
    name = re.sub(r"\W", "_", name)
    is_free = name.isidentifier() and not iskeyword(name) and name != "self"
    return name if is_free else f"_{name}"


def _inputs(graph: Any, file_name: str) -> list[OnnxInput]:
    """The inputs of a graph that have no default.

    Raises:
        LoadError: Where there is no such input, or one is not a tensor of numbers.
    """
    import onnx

    # in version 3 of the format and before, the weights are listed among the inputs
    defaults = {tensor.name for tensor in graph.initializer}
    inputs: list[OnnxInput] = []
    for value in graph.input:
        if value.name in defaults:
            continue
        tensor_type = value.type.tensor_type
        try:
            dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor_type.elem_type)
            torch_dtype = torch.from_numpy(np.zeros(0, dtype)).dtype
        except (KeyError, TypeError, ValueError):
            raise LoadError(
                f"{file_name}: the input {quoted(value.name)} is no tensor of numbers",
                None,
            ) from None
        # an axis of any size has a name instead of a number; some files have 0 or -1
        shape = []
        for axis in tensor_type.shape.dim:
            shape.append(axis.dim_value if axis.dim_value > 0 else None)
        # `x.1` and `x_1` would both become `x_1`
        argument = _argument_name(value.name)
        while any(argument == earlier.argument for earlier in inputs):
            argument += "_"
        inputs.append(
            OnnxInput(
                name=value.name,
                argument=argument,
                dtype=torch_dtype,
                shape=tuple(shape),
                channels_last=_has_channels_last(shape),
            )
        )
    if not inputs:
        raise LoadError(f"{file_name} takes no input", None)
    return inputs


def _has_channels_last(shape: Sequence[int | None]) -> bool:
    """Whether a shape is probably [N, H, W, C], as TensorFlow's exporter writes it. The file
    does not say it, so it is a guess from the sizes."""
    if len(shape) != 4:
        return False
    return shape[3] in _PICTURE_CHANNELS and shape[1] not in _PICTURE_CHANNELS


def _model_class(inputs: Sequence[OnnxInput]) -> type[OnnxModel]:
    """A class of models whose forward has the inputs of a graph as its arguments. An
    argument that is not an image has a default, since `images_per_forward` counts arguments
    without one as images. If the graph has only one input, it has no default."""
    self_parameter = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = []
    # Python wants parameters without a default first
    for item in sorted(inputs, key=lambda item: not item.is_image):
        is_needed = item.is_image or len(inputs) == 1
        parameters.append(
            inspect.Parameter(
                item.argument,
                inspect.Parameter.POSITIONAL_OR_KEYWORD,
                default=inspect.Parameter.empty if is_needed else None,
            )
        )

    def forward(self: OnnxModel, *images: Any, **named: Any) -> Any:
        return self.run(images, named)

    # other modules read from this signature how many images and which keywords it takes
    signature = inspect.Signature([self_parameter, *parameters])
    forward.__signature__ = signature  # type: ignore[attr-defined]
    return type(OnnxModel.__name__, (OnnxModel,), {"forward": forward})


def _add_layers(
    model: OnnxModel, values: GraphValues, tensors: Mapping[str, Any]
) -> None:
    """Give a model a module for each layer that its calls name.

    Args:
        model: The model, whose `calls` are set; the modules are added to it, and to its
            `layers`.
        values: What is known of the graph's values.
        tensors: The graph's initializers, by name.
    """
    # values whose second axis is channels, followed from node to node
    channels_first: set[str] = set()
    # a tensor may be the weight of several nodes: they share one parameter
    parameters: dict[str, nn.Parameter | None] = {}
    for call in all_calls(model.calls):
        layer = model.layers.get(call.name)
        # a module that is called twice is one layer with two calls
        if layer is None:
            layer = type(_class_name(call.type), (OnnxLayer,), {})()
            model.layers[call.name] = layer
            _put_layer(model, call.name, layer)
        if call.node is None:
            continue
        layer.operator = call.node.op_type
        if _gives_channels_first(call, channels_first):
            channels_first.update(call.outputs)
            layer.channel_order = "first"
        _add_parameters(layer, call.node, values, tensors, parameters)


def _class_name(type_name: str) -> str:
    """A name for the Python class of an operator or a module, in at most 60 characters. A
    file may contain any name."""
    return quoted(re.sub(r"\W", "_", type_name), 60)


def _gives_channels_first(call: LayerCall, channels_first: Collection[str]) -> bool:
    """Whether the output of a node is [N, C, ...].

    Args:
        call: The call of the node.
        channels_first: Names of values that are known to be [N, C, ...].
    """
    if call.type in _CHANNELS_FIRST:
        return True
    return (
        call.type in _KEEPS_AXES
        and bool(call.inputs)
        and all(name in channels_first for name in call.inputs)
    )


def _put_layer(model: nn.Module, name: str, layer: nn.Module) -> None:
    """Put a layer into the model under its qualified name. Modules around it that do not
    exist yet are made, as empty containers. If such a container is already in the layer's
    place, the layer replaces it, and takes over the modules inside."""
    *containers, last = name.split(".")
    parent = model
    for container in containers:
        # a container is a ModuleDict, which is never called
        inside = parent._modules.setdefault(container, nn.ModuleDict())
        assert inside is not None
        parent = inside
    # modules inside the layer may have been put into a container before
    before = parent._modules.get(last)
    if before is not None:
        layer._modules.update(before._modules)
    parent._modules[last] = layer


def _add_parameters(
    layer: nn.Module,
    node: Any,
    values: GraphValues,
    tensors: Mapping[str, Any],
    parameters: dict[str, nn.Parameter | None],
) -> None:
    """Give a layer the constants that its node takes, as its parameters.

    Args:
        layer: The layer, to which the parameters are added.
        node: The NodeProto.
        values: What is known of the graph's values.
        tensors: The graph's initializers, by name.
        parameters: The parameters that were made so far, by the names of their
            initializers; None for an initializer that is no parameter. New ones are added.
    """
    names = ("", *_PARAMETER_NAMES.get(node.op_type, ()))
    for index, value in enumerate(node.input):
        tensor_name = values.constants.get(value)
        if not tensor_name:
            continue
        if tensor_name not in parameters:
            parameters[tensor_name] = _parameter(tensors[tensor_name])
        parameter = parameters[tensor_name]
        # torch's exporters keep its names, `layer1.0.conv1.weight`; other tools have numbers
        name = tensor_name.rpartition(".")[2]
        if index < len(names) and names[index]:
            name = names[index]
        elif not name.isidentifier():
            name = f"constant{index}"
        if parameter is not None and name not in layer._parameters:
            layer._parameters[name] = parameter


def _parameter(tensor: Any) -> nn.Parameter | None:
    """An initializer of the graph (TensorProto) as a parameter; None if it holds a shape,
    axes or texts."""
    import onnx

    array = onnx.numpy_helper.to_array(tensor)
    # int64 is for shapes and axes; 8 bits are for weights of a quantised model
    is_quantised = array.dtype in (np.int8, np.uint8)
    if array.dtype.kind != "f" and not is_quantised:
        return None
    return nn.Parameter(torch.from_numpy(np.array(array)), requires_grad=False)
