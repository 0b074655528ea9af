"""Lets Composer run with a CPU build of torch; import this first. torchvision's operators are built for CUDA and cannot
be loaded, but torchvision needs their names. Composer imports it, and no test calls these operators."""

from __future__ import annotations

import torch

if torch.version.cuda is None:
    operators = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
