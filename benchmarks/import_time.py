"""How long `import autopart` takes after `import torch`, and the first use of `autopart.parallelize` after that.

    python benchmarks/import_time.py [--rounds 10]

Every import runs in a process of its own. The target: 0.3 s.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

from common import ROOT, bootstrap, machine

TARGET = 0.3
ONE = """
import json, time
start = time.perf_counter(); import torch
middle = time.perf_counter(); import autopart
end = time.perf_counter(); autopart.parallelize
used = time.perf_counter()
print(json.dumps([middle - start, end - middle, used - end]))
"""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    rounds = parser.parse_args().rounds
    found = []
    for _ in range(rounds):
        output = subprocess.run(
            [sys.executable, "-c", ONE], check=True, capture_output=True, text=True, cwd=ROOT
        ).stdout
        found.append(json.loads(output))
    print(f"{machine()}, {rounds} rounds")
    print(f"import torch     {bootstrap([each[0] for each in found])} s")
    ours = bootstrap([each[1] for each in found])
    print(f"import autopart  {ours} s after it, target {TARGET}: {'met' if ours.meets(TARGET) else 'missed'}")
    print(f"first use        {bootstrap([each[2] for each in found])} s: what `parallelize` needs is loaded")


if __name__ == "__main__":
    main()
