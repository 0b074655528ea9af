"""Adapters: read and restore kinds of state that `ckpt.core` does not handle itself.

Importing this package registers its adapters with the core, through the interface in `ckpt.core.state.wrappers`. To
add an adapter, add a module to this package and register it below.
"""

from ckpt.adapters.modules import CustomModuleNode
from ckpt.adapters.optimizers import CustomOptimizerNode, SeparateOptimizerNode
from ckpt.adapters.shards import ShardsNode
from ckpt.adapters.wrappers import WrapperSubclasses
from ckpt.core.state import wrappers

wrappers.objects += [ShardsNode, CustomModuleNode, SeparateOptimizerNode, CustomOptimizerNode]
wrappers.tensors += [WrapperSubclasses()]
