"""Measurements behind the documents: what the product costs on a machine, beside what the machine allows and its peers.

Not part of the wheel; `wicore bench` is, and what it shares with these lies in `wicore_trt.bench`.
"""
