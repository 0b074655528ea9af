"""The current status of a rank, as gauges and for exporters.

Input: observations of a trainer and its writer. Output: Prometheus, TensorBoard and text. It changes nothing that it
observes, and does not import torch, because it runs in the writer.
"""
