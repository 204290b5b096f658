"""The mutation loop, to be run by hand: python -m tests.fuzz.mutate --seconds 300 [--seed N] [--keep DIRECTORY].

Every case has a number, and that number alone makes it: --seed N --cases 1 repeats it. Distinct faults are told once each.
"""

from __future__ import annotations

import argparse
import io
import re
import tempfile
import time
from collections import Counter
from pathlib import Path
from random import Random

import torch

import fastpersist
from tests.fuzz.court import ALL_VERBS, Court, Finding
from tests.fuzz.forge import good_checkpoint, legacy_checkpoint
from tests.fuzz.mutations import mutant
from tests.fuzz.test_other_files import safetensors_file, tar_checkpoint


def specimens() -> list[bytes]:
    """Good archives: torch's and ours in both layouts, with tensors of many kinds."""
    state = {
        "model": {"weight": torch.arange(300.0), "bias": torch.ones(7, dtype=torch.bfloat16)},
        "sparse": torch.eye(3).to_sparse(),
        "parameter": torch.nn.Parameter(torch.zeros(2, 3)),
        "complex": torch.zeros(3, dtype=torch.complex64),
        "meta": torch.empty(4, device="meta"),
        "large": torch.zeros(1 << 18),
    }
    out = io.BytesIO()
    torch.save(state, out)
    found = [good_checkpoint(), out.getvalue()]
    with tempfile.TemporaryDirectory() as folder:
        for layout in ("auto", "torch"):
            path = Path(folder) / "specimen.pt"
            fastpersist.save(state, path, layout=layout, durable=False)
            found.append(path.read_bytes())
    return found


def signature(finding: Finding) -> str:
    """What makes two faults the same: how they show, and the first words but numbers, paths and addresses.

    Where all is left to torch.load ("mmap", "meta"), it is one fault that errors of one class escape.
    """
    fault = finding.fault or ""
    escaped = re.match(r"escapes: \w+", fault)
    if escaped and finding.verb in ("load mmap", "load meta"):
        return f"torch.load: {escaped[0]}"
    fault = re.sub(r"/\S+\.pt", "PATH", fault)
    verb = "load" if finding.verb.startswith("load") else finding.verb
    return f"{verb}: {re.sub(r'0x[0-9a-f]+|[0-9]+', 'N', fault)[:60]}"


def main() -> None:
    """Run until the time is over; exit status 1 if anything was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int)
    parser.add_argument("--keep", type=Path, help="directory for the first file of each distinct fault")
    options = parser.parse_args()
    archives, others = specimens(), [legacy_checkpoint(), legacy_checkpoint(), safetensors_file(), tar_checkpoint()]
    seen: Counter[str] = Counter()
    deadline = time.monotonic() + options.seconds
    number = options.seed
    with Court() as court:
        while time.monotonic() < deadline and (options.cases is None or number < options.seed + options.cases):
            content = mutant(Random(number), archives, others)
            for finding in court.hear(content, ALL_VERBS):
                if finding.fault is None:
                    continue
                if not seen[signature(finding)]:
                    print(f"case {number}: {ascii(str(finding))[:400]}", flush=True)
                    if options.keep is not None:
                        options.keep.mkdir(parents=True, exist_ok=True)
                        (options.keep / f"{number}.pt").write_bytes(content)
                seen[signature(finding)] += 1
            number += 1
    print(f"{number - options.seed} cases, {sum(seen.values())} faults of {len(seen)} kinds")
    raise SystemExit(1 if seen else 0)


if __name__ == "__main__":
    main()
