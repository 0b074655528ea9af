"""Adapters: read and restore kinds of state that the core does not know.

Importing this package registers its adapters with the core (the interface is `ckpt.core.state.wrappers`). To add an
adapter, add a file to this package and a line below.
"""

from ckpt.adapters.modules import CustomModuleNode
from ckpt.adapters.optimizers import CustomOptimizerNode, SeparateOptimizerNode
from ckpt.adapters.shards import ShardsNode
from ckpt.adapters.wrappers import WrapperSubclasses
from ckpt.core.state import wrappers

wrappers.objects += [ShardsNode, CustomModuleNode, SeparateOptimizerNode, CustomOptimizerNode]
wrappers.tensors += [WrapperSubclasses()]
