"""Training and generation with the `terrace` command on a card, beside DeepSpeed where that is installed.

Every run is a process of its own with a time limit; one that reaches it counts with the steps it did. Prints one JSON object
a line. The exit status is 1 if a run of Terrace failed.
"""

import argparse
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import make_model

# Width, layers, vocabulary; sequences a step and their length; seconds for a run.
MODELS = {
    "97.5M": dict(hidden=768, layers=12, vocabulary=8192, batch=4, seq_len=256, limit=25),
    "1.0B": dict(hidden=2048, layers=18, vocabulary=32000, batch=4, seq_len=1024, limit=40),
}
TINY = {"tiny": dict(hidden=128, layers=2, vocabulary=256, batch=2, seq_len=32, limit=120)}

OFFLOADS = {"none": "none", "host": "cpu", "disk": "nvme"}


# The status of a stage that time did not suffice for.
INCOMPLETE = 75


def emit(**line):
    print(json.dumps(line), flush=True)


def run(command, limit, **more):
    """Output and whether the time was up; its status is None then."""
    print("$", " ".join(map(str, command)), file=sys.stderr, flush=True)
    # A session of its own, so that helpers of the command end with it.
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True, **more)
    try:
        return child.communicate(timeout=limit)[0], child.returncode
    except subprocess.TimeoutExpired:
        print("time is up", file=sys.stderr, flush=True)
    os.killpg(child.pid, signal.SIGTERM)
    try:
        return child.communicate(timeout=5)[0], None
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        return child.communicate()[0], None


def median(values):
    return sorted(values)[len(values) // 2] if values else None


class Runs:
    def __init__(self, options):
        self.options = options
        self.until = time.monotonic() + options.budget
        self.failures = 0
        self.left_out = 0

    def limit(self, wanted):
        """Seconds a run may take; none if nothing is left to begin it."""
        left = self.until - time.monotonic() - 6
        return min(wanted, left) if left > 5 else None

    def no_time_left(self, what):
        self.left_out += 1
        emit(source="terrace", part="end-to-end", name=what, variant="no time left")

    def failed(self, what, status):
        self.failures += 1
        emit(source="terrace", part="end-to-end", name=what, variant="failed", status=status)

    def finetune(self, name, model, folder, offload):
        what = f"finetune {name} offload {offload}"
        limit = self.limit(model["limit"])
        if limit is None:
            return self.no_time_left(what)
        output, disk = folder / "output", folder / "disk"
        command = [self.options.terrace, "finetune", "--model", folder, "--data", folder / "rows.jsonl"]
        command += ["--output", output, "--steps", 8, "--batch-size", model["batch"], "--seq-len", model["seq_len"]]
        command += ["--clip", 1.0, "--no-shuffle", "--offload", offload, "--device", self.options.device, "--json"]
        if offload == "disk":
            command += ["--disk", disk]
        _, status = run(list(map(str, command)), limit)
        metrics = output / "metrics.jsonl"
        steps = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
        shutil.rmtree(output, ignore_errors=True)
        shutil.rmtree(disk, ignore_errors=True)
        # Without the time for all steps it is no failure, without a single one it is.
        if status or not steps or not all(step["loss"] is not None for step in steps):
            return self.failed(what, status)
        self.left_out += status is None
        # The first steps also warm up.
        counted = steps[2:] or steps
        of = lambda key: median([step[key] for step in counted])
        emit(
            source="terrace", part="end-to-end", name=what, variant="terrace", unit="tokens/s",
            value=of("tokens_per_second"), step_seconds=of("step_seconds"), steps=len(steps),
            finished=status == 0, losses=[step["loss"] for step in steps],
            **{key: of(key) for key in ("device_peak_bytes", "host_peak_bytes", "upload_bytes", "download_bytes",
                                        "disk_read_bytes", "disk_write_bytes")},
        )
        return [step["loss"] for step in steps]

    def placements(self, name, model, folder):
        """Training with every offload, whose losses must have the same bits."""
        runs = {offload: self.finetune(name, model, folder, offload) for offload in OFFLOADS}
        done = {offload: losses for offload, losses in runs.items() if losses}
        steps = min(map(len, done.values()), default=0)
        same = len({tuple(losses[:steps]) for losses in done.values()}) <= 1
        variant = "not compared" if len(done) < 2 else "same" if same else "DIFFERENT"
        emit(source="terrace", part="end-to-end", name=f"losses {name} do not depend on placement",
             variant=variant, steps=steps, offloads=sorted(done))
        self.failures += not same
        self.left_out += len(done) < 2

    def generate(self, name, folder, tokens):
        cases = [("none", "bf16", 1), ("none", "bf16", 16), ("none", "int8", 1), ("none", "int4", 1), ("host", "bf16", 16)]
        for offload, weights, batch in cases:
            what = f"generate {name} offload {offload} {weights} batch {batch}"
            limit = self.limit(25)
            if limit is None:
                return self.no_time_left(what)
            prompts = folder / "some.jsonl"
            rows = (folder / "prompts.jsonl").read_text().splitlines(keepends=True)
            prompts.write_text("".join(rows[:batch]))
            command = [self.options.terrace, "generate", "--model", folder, "--prompts", prompts, "--max-new-tokens"]
            command += [tokens, "--ignore-eos", "--offload", offload, "--weights", weights]
            command += ["--device", self.options.device, "--json"]
            text, status = run(list(map(str, command)), limit)
            if status is None:
                self.no_time_left(what)
            elif status:
                self.failed(what, status)
            else:
                rows = json.loads(text)
                made, seconds = sum(len(row["ids"]) for row in rows), max(row["seconds"] for row in rows)
                emit(source="terrace", part="end-to-end", name=what, variant="terrace", unit="tokens/s",
                     value=made / seconds, tokens=made, seconds=seconds)

    def peer(self, name, model, folder):
        for offload, theirs in OFFLOADS.items():
            what = f"finetune {name} offload {offload}"
            limit = self.limit(2 * model["limit"])
            if limit is None:
                return emit(source="deepspeed", part="end-to-end", name=what, variant="no time left")
            command = [sys.executable, self.options.peer, theirs, "--hidden", model["hidden"], "--layers", model["layers"]]
            command += ["--vocab", model["vocabulary"], "--batch", model["batch"], "--seq", model["seq_len"]]
            command += ["--steps", 8, "--dir", folder / "swap"]
            environment = dict(os.environ, DS_ACCELERATOR="cuda" if self.options.device != "cpu" else "cpu")
            text, status = run(list(map(str, command)), limit, env=environment)
            shutil.rmtree(folder / "swap", ignore_errors=True)
            last = next((line for line in reversed(text.splitlines()) if line.startswith("{")), None)
            if status == 0 and last:
                found = json.loads(last)
                emit(source="deepspeed", part="end-to-end", name=what, variant=f"ZeRO-3 {theirs}", unit="tokens/s",
                     value=found["tokens_per_second"], step_seconds=found.get("step_seconds"))
            else:
                why = "no time left" if status is None else "failed"
                emit(source="deepspeed", part="end-to-end", name=what, variant=why, status=status)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--terrace", default="bin/terrace", help="the command")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--scratch", default="scratch", help="folder for models and state, on a local drive")
    parser.add_argument("--budget", type=float, default=180, help="seconds for everything")
    parser.add_argument("--sizes", choices=["full", "tiny"], default="full")
    parser.add_argument("--peer", help="a script that trains the same model with DeepSpeed: FILE none|cpu|nvme --hidden N "
                        "--layers N --vocab N --batch N --seq N --steps N --dir DIR, and prints a JSON line with "
                        "tokens_per_second at the end")
    options = parser.parse_args()
    runs = Runs(options)
    if options.peer and not importlib.util.find_spec("deepspeed"):
        print("deepspeed is not installed: no peer", file=sys.stderr)
        options.peer = None
    for name, model in (MODELS if options.sizes == "full" else TINY).items():
        folder = Path(options.scratch) / f"model-{name}"
        began = time.monotonic()
        shape = {key: model[key] for key in ("hidden", "layers", "vocabulary", "seq_len")}
        count = make_model.make(folder, rows=8 * model["batch"], **shape)
        print(f"{name}: {count} parameters made in {time.monotonic() - began:.1f} s", file=sys.stderr)
        try:
            runs.placements(name, model, folder)
            runs.generate(name, folder, 64 if options.sizes == "full" else 4)
            if options.peer:
                runs.peer(name, model, folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    return 1 if runs.failures else INCOMPLETE if runs.left_out else 0


if __name__ == "__main__":
    sys.exit(main())
