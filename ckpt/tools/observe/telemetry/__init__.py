"""What does a rank do right now? Its status, as gauges and for exporters.

In: looks at a trainer and its writer. Out: Prometheus, TensorBoard and text. It may not change what it looks at, nor
import torch: it runs in the writer.
"""
