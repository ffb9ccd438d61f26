"""The teacher's network in one form, whatever file it comes from; every leaf is checked before it is used.

Three torsos read frames `[B, 4, 84, 84]` uint8, the oldest frame first, divided by 255 and moved to `[B, 84, 84, 4]`:

    shallow   conv 16 8x8/4, conv 32 4x4/2                     (IMPACT's)
    nature    conv 32 8x8/4, conv 64 4x4/2, conv 64 3x3/1      (Mnih et al. 2015)
    resnet    3 stacks of 16, 32, 32 channels: conv 3x3, max pool 3x3/2, two residual blocks of two conv 3x3
              (Espeholt et al. 2018); the convolutions and the pool are padded

then a dense layer of any width and the head, `[width, A]` or `[width, A * atoms]` (each action's atoms together).
What this project's scripts learned from frames of 42 x 42 (--frame-size 42; first convolution 4x4/2) reads means of
2 x 2 pixels, which is what EnvPool's own reduction to that size amounts to.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from .errors import TeacherError

Layer = Mapping[str, np.ndarray]  # "kernel" ([height, width, in, out] or [in, out]) and "bias" ([out])
Kind = Literal["q", "c51", "policy"]

CONVOLUTIONS = {  # kernel height and width, stride, output channels; in order of application
    "shallow": ((8, 4, 16), (4, 2, 32)),
    "nature": ((8, 4, 32), (4, 2, 64), (3, 1, 64)),
    "resnet": tuple((3, 1, channels) for channels in (16, 32, 32) for _ in range(5)),
}
PADDING = {  # rows of the first dense layer, which tell the convolutions' padding: 84 -> 20 -> 9, or 84 -> 21 -> 11
    "shallow": {9 * 9 * 32: "VALID", 11 * 11 * 32: "SAME"},
    "nature": {7 * 7 * 64: "VALID", 11 * 11 * 64: "SAME"},
    "resnet": {11 * 11 * 32: "SAME", 6 * 6 * 32: "SAME"},  # the latter of 42 x 42
}


@dataclass(frozen=True, eq=False)
class Teacher:
    """A fixed policy. Its scores are Q values (kind q), means of C51's return distributions (c51), or logits (policy).

    QDagger's target is softmax(scores / temperature) for q and c51, and softmax(scores) for policy."""

    kind: Kind
    network: str  # shallow, nature or resnet
    padding: str  # VALID or SAME
    num_actions: int  # A
    params: dict[str, Any]  # convs: list of layers, hidden and head: layers; c51: support [atoms]
    protocol: dict[str, Any]  # what is known of its environment; basis: recorded in the file, or usual there
    source: str  # file or hub id, for messages
    frame_size: int = 84  # of the frames that it learned from, or 42

    def apply(self, obs: jax.Array, params: dict[str, Any] | None = None) -> jax.Array:
        """Scores `[B, A]` float32 of observations `[B, 4, 84, 84]` uint8, the oldest frame first.

        In a jitted function pass `teacher.params` in as an argument and hand it on as `params`: XLA would otherwise
        build millions of constants into the program."""
        chex.assert_shape(obs, (None, 4, 84, 84))
        chex.assert_type(obs, jnp.uint8)
        params = self.params if params is None else params
        x = jnp.moveaxis(obs, 1, -1).astype(jnp.float32) / 255.0
        if self.frame_size == 42:
            x = jnp.round(nn.avg_pool(x, (2, 2), (2, 2)) * 255.0) / 255.0
        if self.network == "resnet":
            for i in range(0, 15, 5):
                first, *blocks = params["convs"][i : i + 5]
                x = nn.max_pool(conv(x, first, 1, "SAME"), (3, 3), (2, 2), "SAME")
                for inner, outer in (blocks[:2], blocks[2:]):
                    residual = conv(nn.relu(x), inner, 1, "SAME")
                    x = x + conv(nn.relu(residual), outer, 1, "SAME")
            x = nn.relu(x)
        else:
            shapes = convolutions(self.network, self.frame_size)
            for layer, (_, stride, _) in zip(params["convs"], shapes, strict=True):
                x = nn.relu(conv(x, layer, stride, self.padding))
        x = nn.relu(dense(x.reshape(x.shape[0], -1), params["hidden"]))
        x = dense(x, params["head"])
        if self.kind == "c51":
            probabilities = nn.softmax(x.reshape(x.shape[0], self.num_actions, -1))
            x = jnp.sum(probabilities * params["support"], axis=-1)
        return x


def convolutions(network: str, frame_size: int) -> tuple[tuple[int, int, int], ...]:
    """Those of a network; for frames of 42 x 42 shallow and nature begin with half the kernel and half the stride."""
    first, *others = CONVOLUTIONS[network]
    return ((4, 2, first[2]) if frame_size == 42 and network != "resnet" else first, *others)


def conv(x: jax.Array, layer: Layer, stride: int, padding: str) -> jax.Array:
    """Convolution of `[B, H, W, C]` with a kernel `[height, width, C, out]`."""
    strides, axes = (stride, stride), ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, layer["kernel"], strides, padding, dimension_numbers=axes) + layer["bias"]


def dense(x: jax.Array, layer: Layer) -> jax.Array:
    return x @ layer["kernel"] + layer["bias"]


def atoms(source: str, low: float, high: float, number: int) -> np.ndarray:
    """The values of C51's atoms `[number]`, evenly from low to high."""
    if not (isinstance(number, int) and 2 <= number <= 1000 and low < high):
        raise TeacherError(f"{source}: {number} atoms from {low} to {high} are no C51 support; choose another teacher")
    return np.linspace(low, high, number)


# --- from a file's parameter tree to a teacher ------------------------------------------------------------------------
@dataclass(frozen=True)
class Layout:
    """Where files of one origin keep the layers: paths in the parameter tree."""

    convs: tuple[str, ...]  # in order of application, which need not be that of their names
    hidden: str
    head: str
    value: str | None = None  # an actor-critic's value head [width, 1]: checked, not used

    @property
    def names(self) -> set[str]:
        return {*self.convs, self.hidden, self.head, *([self.value] if self.value else [])}


def layers_of(source: str, tree: Any) -> dict[str, Layer]:
    """The layers of a nested dict of parameters by their paths, such as "encoder/Stack_0/Conv_1"."""
    layers, todo = {}, [((), tree)]
    for path, node in todo:  # the list grows while it is read, up to a bound: a hostile tree may branch without end
        name = "/".join(path)
        if not isinstance(node, dict) or len(todo) > 1000 or len(path) > 8:
            raise TeacherError(f"{source}: {name or 'its content'} is no tree of layers; see teachers/ for the formats")
        if set(node) == {"kernel", "bias"}:
            layers[name] = node
        else:
            todo += [((*path, str(key)), child) for key, child in node.items()]
    return layers


def choose_layout(source: str, layers: dict[str, Layer], layouts: Sequence[Layout]) -> Layout:
    """The layout whose layers are exactly those of the file."""
    for layout in layouts:
        if layout.names == set(layers):
            return layout
    raise TeacherError(
        f"{source}: unknown network with the layers {', '.join(sorted(layers))[:200] or '(none)'}; choose a teacher "
        "with a shallow, nature or resnet network, without noisy or dueling layers"
    )


def make_teacher(
    source: str,
    kind: Kind,
    layers: dict[str, Layer],
    layout: Layout,
    num_actions: int,
    protocol: dict,
    support=None,
    frame_size: int = 84,
) -> Teacher:
    """Checks the shape of every leaf and makes a teacher of them. `support` `[atoms]`: values of C51's atoms.

    The number of convolutions names the torso, the rows of the first dense layer the padding."""
    if not isinstance(protocol.get("env_id", ""), str):
        raise TeacherError(f"{source}: its env_id is {protocol['env_id']!r}, no name of a game; choose another teacher")
    network = {len(convs): name for name, convs in CONVOLUTIONS.items()}[len(layout.convs)]
    channels = 4
    for name, (side, _, out) in zip(layout.convs, convolutions(network, frame_size), strict=True):
        check_layer(source, network, name, layers[name], (side, side, channels, out))
        channels = out

    rows, units = (*np.shape(layers[layout.hidden]["kernel"]), 0, 0)[:2]
    if rows not in PADDING[network]:
        known = " or ".join(f"{n:,} ({padding} padding)" for n, padding in PADDING[network].items())
        raise TeacherError(
            f"{source}: {layout.hidden}/kernel has {rows:,} rows, the {network} network needs {known}; choose a "
            "teacher that was trained on four grey frames of 84 x 84"
        )
    check_layer(source, network, layout.hidden, layers[layout.hidden], (rows, units))
    if layout.value:
        check_layer(source, network, layout.value, layers[layout.value], (units, 1))

    outputs = np.shape(layers[layout.head]["kernel"])[-1:]
    per_action = 1 if support is None else len(support)
    if outputs and outputs != (num_actions * per_action,):
        whole = outputs[0] % per_action == 0
        have = f"{outputs[0] // per_action} actions" if whole else f"{outputs[0]} outputs of {per_action} atoms"
        raise TeacherError(
            f"{source}: the teacher has {have}, the game has {num_actions} actions; choose a teacher of this game with "
            "the same (minimal) action set"
        )
    check_layer(source, network, layout.head, layers[layout.head], (units, num_actions * per_action))

    used = {"convs": [layers[name] for name in layout.convs]}
    used |= {"hidden": layers[layout.hidden], "head": layers[layout.head]}
    if support is not None:
        used["support"] = support
    params = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf, np.float32)), used)
    return Teacher(kind, network, PADDING[network][rows], num_actions, params, dict(protocol), source, frame_size)


def check_layer(source: str, network: str, name: str, layer: Layer, kernel_shape: tuple[int, ...]) -> None:
    for leaf, shape in ("kernel", kernel_shape), ("bias", kernel_shape[-1:]):
        array = layer[leaf]
        if not isinstance(array, np.ndarray) or not np.issubdtype(array.dtype, np.floating):
            raise TeacherError(f"{source}: {name}/{leaf} is not an array of floats; get the file again")
        if array.shape != shape:
            raise TeacherError(
                f"{source}: {name}/{leaf} has shape {array.shape}, the {network} network needs {shape}; choose a "
                "teacher with one of the networks in teachers/network.py"
            )
        if not np.isfinite(array).all():
            raise TeacherError(f"{source}: {name}/{leaf} holds NaN or infinity; choose an earlier checkpoint")
