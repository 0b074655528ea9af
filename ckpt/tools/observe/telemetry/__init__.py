"""The current status of a rank, as gauges, and exporters for it.

The input is observations of a trainer and its writer. The output is for Prometheus, TensorBoard and text. The package
changes nothing that it observes, and does not import torch, because it runs in the writer.
"""
