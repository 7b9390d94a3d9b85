# SPDX-License-Identifier: Apache-2.0
"""Runs a build quietly and shows its progress: python scripts/progress.py TEXT COMMAND...

Ninja's steps, `[12/110]`, become one line on a terminal, and a line for each tenth elsewhere. The output of a command
that fails is printed whole.
"""

import re
import subprocess
import sys

STEP = re.compile(r"\[(\d+)/(\d+)\] ")


def main() -> int:
    """Runs the command; returns its exit code."""
    text, *command = sys.argv[1:]
    print(f"{text} ...", flush=True)
    lines, tenth = [], 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        for line in process.stdout or ():
            lines.append(line)
            if not (step := STEP.search(line)):
                continue
            done, total = int(step[1]), int(step[2])
            if sys.stdout.isatty():
                print(f"\r  {done} of {total} files", end="\n" if done == total else "", flush=True)
            elif done * 10 // total > tenth:
                tenth = done * 10 // total
                print(f"  {done} of {total} files", flush=True)
    if process.returncode:
        print("".join(lines), end="")
    return process.returncode


if __name__ == "__main__":
    sys.exit(main())
