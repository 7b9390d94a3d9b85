#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Runs a part of `make test`, and notes how long it took: scripts/timed.sh NAME COMMAND...
name=$1
shift
begin=$(date +%s)
"$@"
status=$?
spent=$(($(date +%s) - begin))
mkdir -p build
line=$(printf '%-10s %3d min %02d s' "$name" $((spent / 60)) $((spent % 60)))
if [ $status -ne 0 ]; then
  echo "make test: $line, and failed" >&2
  exit $status
fi
echo "$line" >>build/times
