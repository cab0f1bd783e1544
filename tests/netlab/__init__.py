"""Several hosts on one machine: network namespaces joined by a switch, with rates, cuts and shares of the processors.

    with Lab(hosts=3, rate="100mbit", cores=0.5) as lab:
        server = lab.hosts[0].popen([sys.executable, "serve.py", lab.hosts[0].address])
        ...
        lab.hosts[1].cut()

Tests call `require()` first, which skips them where no lab can be built.
"""

from netlab.lab import Host, Lab, LabError, Queue, bits_of, require, split_cpus, why_not

__all__ = ["Host", "Lab", "LabError", "Queue", "bits_of", "require", "split_cpus", "why_not"]
