"""The rate of DRAM beside a measurement, for programs that do not measure it themselves."""

import json
import subprocess

# Its lines have the rate of reads (dram_gbps); the product itself does not matter.
COMMAND = ("linear", "--n=4096", "--k=4096", "--dtype=f32", "--out=f32", "--m=1", "--runs=5", "--format=json")

# Rates of DRAM that are within this factor of each other are one rate.
ONE_RATE = 1.1


class DramRate:
    """Runs tools/perf before and after each measurement; without a `perf`, every rate is unknown."""

    def __init__(self, perf, threads):
        self.words = perf and [str(perf), *COMMAND, f"--threads={threads}"]
        self.last = self.read()

    def read(self):
        """GB/s of reads, or None."""
        if not self.words:
            return None
        done = subprocess.run(self.words, capture_output=True, text=True)
        lines = done.stdout.splitlines()
        return json.loads(lines[-1]).get("dram_gbps") if lines else None

    def beside(self):
        """What a row says about DRAM since the last call: the mean of the rates at both ends, and whether they agree."""
        before, self.last = self.last, self.read()
        if before is None or self.last is None:
            return {}
        steady = max(before, self.last) <= ONE_RATE * min(before, self.last)
        return {"dram_gbps": round((before + self.last) / 2, 1), "limits": "steady" if steady else "disturbed"}
