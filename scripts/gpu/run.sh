#!/usr/bin/env bash
# Proves and measures the CUDA backend on a machine with a card: what `cargo xtask gpu-pack` put beside this file.
set -uo pipefail

usage() {
    cat <<'END'
usage: ./run.sh [OPTION]... [STAGE]...

stages, all without any; each has a time limit, and what fails in one does not keep the others from running:
  report      what the machine has; fails without a card
  kernels     every kernel on the card against the reference
  torch       every kernel on the card against torch's own functions; skipped without torch
  engine      placement invariance, parity with torch and transformers, crashes and limits: training on the card
  sanitizer   compute-sanitizer's memcheck and racecheck over tests of kernels
  bench       copies and kernels, alternating with torch
  end-to-end  training and generation with the command, and DeepSpeed with --peer

  --output DIR    results: results.jsonl, table.txt, a log a stage [default: $OUT, else results]
  --scratch DIR   for models, state and compiled kernels, on a local drive [default: scratch beside this script]
  --budget N      seconds for everything [default: 590]
  --tests NAMES   of the engine's test programs in tests/, separated by commas [default: placement,suite,fp16,accumulation,keeping,
                  packed]
  --filter TEXT   only tests of the stages kernels and engine whose name contains it
  --rounds N      of the stage bench [default: 2]
  --peer FILE     a script that trains with DeepSpeed; scripts/gpu/end_to_end.py says how it is called
  --tiny          small sizes, for drivers that only play a card

PYTHON names the interpreter with torch [default: python3]. TERRACE_TEST_DEVICE names the card [default: cuda:0].
The exit status is 1 if a stage that checks (all but bench) failed.
END
}

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
output=${OUT:-results}
scratch=$here/scratch
budget=590 rounds=2 sizes=full tests='' filter='' peer=''
stages=()
while (($#)); do
    case $1 in
    --output | --scratch | --budget | --rounds | --tests | --filter | --peer)
        (($# > 1)) || { echo "$1 needs a value" >&2; exit 2; }
        declare "${1#--}=$2"
        shift
        ;;
    --tiny) sizes=tiny ;;
    report | kernels | torch | engine | sanitizer | bench | end-to-end) stages+=("$1") ;;
    -h | --help) usage; exit 0 ;;
    *) usage >&2; exit 2 ;;
    esac
    shift
done
((${#stages[@]})) || stages=(report kernels torch engine sanitizer bench end-to-end)
[[ -z $peer ]] || peer=$(realpath "$peer")
mkdir -p "$output" "$scratch" || exit 2
output=$(cd "$output" && pwd)
scratch=$(cd "$scratch" && pwd)
work=$(mktemp -d "$scratch/run.XXXXXX") || exit 2
trap 'rm -rf "$work" "$here/tmp"' EXIT
# Tests look for their fixtures below the folder they run in.
cd "$here" || exit 2
find bin tests -name '*.gz' -exec gunzip -f {} +

python=${PYTHON:-python3}
# The libraries' search knows the environment that torch's own CUDA libraries are in by this.
if [[ -z ${VIRTUAL_ENV:-} ]]; then
    VIRTUAL_ENV=$("$python" -c 'import sys; print(sys.prefix)' 2>/dev/null) && export VIRTUAL_ENV
fi
export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
# One card alone is shown to every stage, as the first.
card=${TERRACE_TEST_DEVICE:-cuda:0}
card=${card#cuda:}
[[ $card =~ ^[0-9]+$ ]] || { echo "TERRACE_TEST_DEVICE=$TERRACE_TEST_DEVICE: name a card as cuda:0" >&2; exit 2; }
IFS=, read -ra visible <<<"${CUDA_VISIBLE_DEVICES:-}"
if ((${#visible[@]})); then
    ((card < ${#visible[@]})) || { echo "cuda:$card: CUDA_VISIBLE_DEVICES shows ${#visible[@]}" >&2; exit 2; }
    card=${visible[card]}
fi
export CUDA_VISIBLE_DEVICES=$card TERRACE_TEST_DEVICE=cuda:0
# Makes the kernels' suites run on the card; a driver that plays one finds its kernels by it.
export TERRACE_SHIM_LIBRARY=${TERRACE_SHIM_LIBRARY:-card}
# State of tests is written with direct I/O, which not every /tmp takes; compiled kernels are kept for later runs.
# For a machine without NVRTC.
export TERRACE_PTX=$here/ptx
export TMPDIR=$work XDG_CACHE_HOME=$scratch/cache
ln -sfn "$work" tmp

lines=$output/results.jsonl
: >"$lines"
began=$SECONDS

# What `terrace report` prints, on one line.
report() {
    bin/terrace report || return 1
    local found
    found=$(bin/terrace report --json) || return 1
    "$python" - "$found" "$(cat about.json)" <<'END' >>"$lines"
import json, sys
report, about = (json.loads(text) for text in sys.argv[1:])
print(json.dumps({"report": report, "pack": about}))
sys.exit(report["gpu_problem"])
END
    local status=$?
    nvidia-smi 2>/dev/null || echo "nvidia-smi: not found"
    "$python" -c 'import torch; print("torch", torch.__version__, "cuda", torch.version.cuda)' 2>/dev/null || echo "torch: not found"
    compute-sanitizer --version 2>/dev/null || echo "compute-sanitizer: not found"
    ((status == 0)) || detail="no card"
    return "$status"
}

# Runs the test programs after `--` with the arguments before it, and counts.
run_tests() {
    local arguments=() program passed=0 failed=0 unfinished=() text counts
    while [[ $1 != -- ]]; do arguments+=("$1"); shift; done
    shift
    for program in "$@"; do
        # What is left of the stage is this program's limit.
        local limit=$((deadline - SECONDS))
        if ((limit < 2)); then unfinished+=("$(basename "$program")"); continue; fi
        echo "== $(basename "$program") ${arguments[*]}"
        text=$(timeout -k 5 "$limit" "$program" ${filter:+"$filter"} "${arguments[@]}" 2>&1)
        local status=$?
        echo "$text"
        counts=$(sed -n 's/^test result: [A-Za-z]*\. \([0-9]*\) passed; \([0-9]*\) failed.*/\1 \2/p' <<<"$text" | tail -1)
        passed=$((passed + ${counts%% *}+0)) failed=$((failed + ${counts##* }+0))
        # No count: it ran out of time, or the process ended.
        if [[ -z $counts ]]; then
            ((status == 124 || status == 137)) || failed=$((failed + 1))
            unfinished+=("$(basename "$program")")
        fi
    done
    detail="$passed passed, $failed failed"
    ((${#unfinished[@]} == 0)) || detail+=", not finished: ${unfinished[*]}"
    ((failed == 0 && passed > 0 && ${#unfinished[@]} == 0))
}

kernels() {
    run_tests --include-ignored -- tests/kernels-*
}

# Cases of a dump that ended early are compared, too.
torch_check() {
    if ! "$python" -c 'import torch' 2>/dev/null; then
        echo "torch: not found: skipped"
        detail="torch not found"
        return 77
    fi
    local arguments=() dumped compared left
    [[ $sizes == full ]] || arguments=(--device cpu)
    timeout -k 5 $((deadline - SECONDS)) bin/kernel-dump --output "$work/dump" --sizes "$sizes" --device "${TERRACE_TEST_DEVICE#cuda:}"
    dumped=$?
    # No seconds would be no limit.
    left=$((deadline - SECONDS))
    ((left > 0)) || left=1
    timeout -k 5 "$left" "$python" torch_check.py "$work/dump" "${arguments[@]}" | tee -a "$lines"
    compared=$?
    rm -rf "$work/dump"
    detail="$(grep -c '"check": "torch".*"verdict": "ok"' "$lines") right"
    detail+=", $(grep '"check": "torch"' "$lines" | grep -vc '"verdict": "ok"') wrong"
    ((dumped == 0)) || detail+=", not every case was run"
    ((compared != 124 && compared != 137)) || detail+=", not every case was compared"
    ((dumped == 0 && compared == 0))
}

engine() {
    local programs=() name
    if [[ -n $tests ]]; then
        for name in ${tests//,/ }; do programs+=("tests/models-$name"); done
    else
        # What matters most comes first, in case the time is short.
        programs=(tests/models-placement tests/models-suite tests/models-fp16 tests/models-accumulation tests/models-keeping
            tests/models-packed)
    fi
    run_tests --include-ignored -- "${programs[@]}"
}

# Racecheck takes many times as long, and only kernels with shared memory can race. First those that copy asynchronously, which no
# emulation checks for races.
sanitizer() {
    local tool
    tool=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2>/dev/null)
    if [[ -z $tool ]]; then
        echo "compute-sanitizer: not found: skipped"
        detail="compute-sanitizer not found"
        return 77
    fi
    local failed=0 late=0 clean=0 pair program tests text seconds
    for pair in memcheck:{tensor_cores,attention,matmul,quantized,norm,loss,embedding,rope,activation,elementwise,update,sums} \
        racecheck:{tensor_cores,attention,matmul,quantized,norm,loss,sums}; do
        seconds=$((deadline - SECONDS))
        # None has more than its part of what is left.
        if [[ $pair == memcheck:* ]]; then ((seconds < 25)) || seconds=25; else seconds=$((seconds / 2)); fi
        if ((seconds < 2)); then late=$((late + 1)); continue; fi
        echo "== $pair"
        program=tests/kernels-conformance tests=${pair#*:}::
        [[ $pair != *:update ]] || program=tests/kernels-update tests=runs_within_a_state
        [[ $pair != *:sums ]] || program=tests/kernels-update tests=sums_of_squares
        text=$(timeout -k 5 "$seconds" "$tool" --tool "${pair%:*}" --error-exitcode 99 "$program" \
            "$tests" --include-ignored --test-threads=1 2>&1)
        local status=$?
        echo "$text"
        if [[ $text == *"Device not supported"* ]]; then
            detail="compute-sanitizer does not support this machine's device"
            return 77
        fi
        case $status in
        0) clean=$((clean + 1)) ;;
        124 | 137) late=$((late + 1)); echo "-- not finished" ;;
        *) failed=$((failed + 1)); echo "-- FAILED" ;;
        esac
    done
    detail="$clean clean, $failed failed, $late not finished"
    if ((failed)); then return 1; fi
    ((clean && !late)) || return 75
}

# One part after the other, ours and torch's in turn, so that what else the machine does meets both.
bench() {
    local round part status=0
    local sizes_of_torch=(--sizes "$sizes")
    [[ $sizes == full ]] || sizes_of_torch+=(--device cpu --samples 3)
    local with_torch=1
    "$python" -c 'import torch' 2>/dev/null || { with_torch=0; echo "torch: not found: only ours"; }
    for ((round = 1; round <= rounds; round++)); do
        for part in copies matmul attention rows quantized adamw; do
            ((deadline - SECONDS > 2)) || { detail="time is up in round $round"; return 75; }
            timeout -k 5 $((deadline - SECONDS)) bin/cuda-bench --only "$part" --sizes "$sizes" | tee -a "$lines" || status=1
            ((with_torch && deadline - SECONDS > 2)) || continue
            timeout -k 5 $((deadline - SECONDS)) "$python" torch_bench.py --only "$part" "${sizes_of_torch[@]}" | tee -a "$lines" || status=1
        done
    done
    return "$status"
}

end_to_end() {
    "$python" end_to_end.py --terrace "$here/bin/terrace" --device "$TERRACE_TEST_DEVICE" --scratch "$work" \
        --sizes "$sizes" --budget $((deadline - SECONDS)) ${peer:+--peer "$peer"} | tee -a "$lines"
}

run_stage() {
    case $1 in
    report) report ;;
    kernels) kernels ;;
    torch) torch_check ;;
    engine) engine ;;
    sanitizer) sanitizer ;;
    bench) bench ;;
    end-to-end) end_to_end ;;
    esac
}

# Seconds that a stage may take.
declare -A limits=([report]=20 [kernels]=90 [torch]=50 [engine]=100 [sanitizer]=90 [bench]=100 [end-to-end]=140)

worst=0
for stage in "${stages[@]}"; do
    limit=${limits[$stage]}
    # A stage alone may take all the time there is.
    ((${#stages[@]} > 1)) || limit=$budget
    left=$((began + budget - SECONDS))
    ((limit <= left)) || limit=$left
    stage_began=$SECONDS deadline=$((SECONDS + limit)) detail=''
    echo "==== $stage, at most $limit s" >&2
    if ((limit < 3)); then
        status=75 detail="no time left"
    else
        # Not in a pipeline, so that `detail` comes back.
        run_stage "$stage" > >(tee "$output/$stage.log" >&2) 2>&1
        status=$?
        wait "$!"
    fi
    case $status in
    0) verdict=passed ;;
    75) verdict=incomplete ;;
    77) verdict=skipped ;;
    *)
        verdict=FAILED
        [[ $stage == bench ]] || worst=1
        ;;
    esac
    printf '{"stage":"%s","status":"%s","seconds":%d,"limit":%d,"detail":"%s"}\n' \
        "$stage" "$verdict" $((SECONDS - stage_began)) "$limit" "$detail" >>"$lines"
done
"$python" results.py "$lines" | tee "$output/table.txt"
exit "$worst"
