#!/bin/sh
# Run the CPU plugin's tests with kernels built for a sanitizer: scripts/sanitize_cpu.sh address,undefined|thread [LEVELS]
# LEVELS are those to build besides plain (all that the compiler knows). First the sanitizer must find planted mistakes.
#
# Tile instructions are emulated: so what they read and write is seen, on any processor.
#
# Races need threads: test_team.py has a kernel of each kind that threads share out, each with the fewest chunks that
# let them meet, and test_recorded_list.py has lists, recorded and replayed, by several engines at once. The other tests
# call these kernels with other numbers, and the thread sanitizer runs those two alone.
set -eu
cd "$(dirname "$0")/.."
root=$PWD

sanitizer=$1
levels=${2:-}
python=${PYTHON:-$root/.venv/bin/python}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

library() {
    realpath "$(c++ -print-file-name="$1")"
}

# torch's memory and Python's is neither's to judge: leaks go unseen. A report ends the process.
export ASAN_OPTIONS=detect_leaks=0:abort_on_error=0:detect_odr_violation=0
export UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1
export TSAN_OPTIONS="suppressions=$root/scripts/tsan.supp:halt_on_error=1:exitcode=66"

# The sanitizers of older compilers know no layouts of memory as random as newer kernels make them.
exec_plainly="setarch $(uname -m) --addr-no-randomize"
$exec_plainly true 2>/dev/null || exec_plainly=

c++ -std=c++20 -O1 -g -fopenmp "-fsanitize=$sanitizer" -Iplugins/cpu/csrc -o "$folder/planted" \
    tests/cpu/planted.cpp plugins/cpu/csrc/team.cpp -ldl
$exec_plainly "$folder/planted" nothing || { echo "$sanitizer: what is right is reported"; exit 1; }
for kind in $(echo "$sanitizer" | tr , ' '); do
    if $exec_plainly "$folder/planted" "$kind" >"$folder/report" 2>&1; then
        echo "$kind: a planted mistake was not found"
        exit 1
    fi
    grep -q -e Sanitizer -e 'runtime error' "$folder/report" || { cat "$folder/report"; exit 1; }
    echo "$kind: a planted mistake was found"
done

cp -R plugins/cpu "$folder/cpu"
rm -rf "$folder/cpu/build" "$folder"/cpu/src/*.egg-info "$folder"/cpu/src/hardpoint_cpu/_native*.so
printf '[build_ext]\nemulate_tiles = 1\nlevels = %s\n' "${levels:+amx,}${levels:-all}" >"$folder/cpu/setup.cfg"
HARDPOINT_CPU_SANITIZE=$sanitizer "$python" -m pip wheel --quiet --disable-pip-version-check --no-deps \
    --no-build-isolation --wheel-dir "$folder/wheel" "$folder/cpu"
"$python" -m pip install --quiet --disable-pip-version-check --no-deps --target "$folder/site" "$folder"/wheel/*.whl

# libstdc++ beside them: loaded later, its exceptions would not be caught by the sanitizer's wrappers.
case $sanitizer in
    thread)
        preload=$(library libtsan.so)
        tests="team recorded_list"
        ;;
    *)
        preload="$(library libasan.so) $(library libubsan.so)"
        tests="linear attention ops team recorded_list"
        ;;
esac
env LD_PRELOAD="$preload $(library libstdc++.so)" PYTHONPATH="$folder/site" PYTHONMALLOC=malloc OMP_NUM_THREADS=2 \
    $exec_plainly "$python" -m pytest -q -p no:cacheprovider -m "not nightly" $(printf ' tests/cpu/test_%s.py' $tests)
