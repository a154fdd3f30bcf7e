"""A network laboratory on one Linux machine: hosts behind NATs, with lines and distances that you choose.

>>> from torch_iroh.lab import Lab
>>> with Lab(delay=15) as lab:  # doctest: +SKIP
...     anna = lab.host("anna", nat="port", up=20, down=100)
...     bert = lab.host("bert", nat="symmetric", up=20, down=100)
...     lab.host("relay")  # public, no NAT
...     training = anna.popen(["python", "train.py"])
...     lab.cut(anna, bert)

Each host is a network namespace, each NAT another with nft rules, and one process of ours is the internet between them.
Needs root, `ip`, `nft` and a C++ compiler; :func:`obstacle` says what is missing. The command is `torch-iroh lab`.
"""

from __future__ import annotations

from torch_iroh.lab._emulator import Traffic
from torch_iroh.lab._host import Host
from torch_iroh.lab._lab import Lab, obstacle
from torch_iroh.lab._nat import NATS
from torch_iroh.lab._schedule import Event, Schedule
from torch_iroh.lab._system import LabError

__all__ = ["NATS", "Event", "Host", "Lab", "LabError", "Schedule", "Traffic", "obstacle"]
