"""Imported before Composer beside a CPU build of torch: torchvision's operators are built for CUDA and do not load, and
it is not imported without their names. Composer imports it, and none of them is called here."""

from __future__ import annotations

import torch

if torch.version.cuda is None:
    operators = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
