#!/bin/sh
# Runs the quick tests on every Python we promise, with the oldest and the newest torch and diffusers: make compat
# Python versions that are not here are told and left out; PYTHONS="3.12" asks for some only. Environments stay in
# COMPAT_DIR (default: .compat) and are used again. OLDEST and NEWEST may name other versions, e.g. where only some builds of
# torch can be had: OLDEST="torch==2.13.0 diffusers==0.36.* transformers==4.49.* numpy==1.26.*" make compat
set -u
cd "$(dirname "$0")/.." || exit 1
PYTHONS=${PYTHONS:-"3.11 3.12 3.13 3.14"}
DIR=${COMPAT_DIR:-.compat}
TESTS=${TESTS:-"tests/test_config.py tests/test_api.py tests/online tests/masks tests/models/test_attachment.py tests/fuzz"}
OLDEST=${OLDEST:-"torch==2.5.* diffusers==0.36.* transformers==4.49.* numpy==1.26.*"}
NEWEST=${NEWEST:-"torch diffusers transformers"}
failed=0

# run NAME PYTHON REQUIREMENTS...: an environment with these, and the tests in it
run() {
    name=$1 python=$2
    shift 2
    env="$DIR/$name"
    if ! { test -x "$env/bin/python" || "$python" -m venv "$env"; } >/dev/null 2>&1; then
        echo "$name: no environment can be made"; failed=1; return
    fi
    if ! "$env/bin/python" -m pip --disable-pip-version-check install -q --only-binary numpy,torch "$@" \
        -e . pytest pytest-timeout hypothesis scipy psutil >"$env/install.log" 2>&1; then
        echo "$name: these versions cannot be had for this Python ($env/install.log)"; return
    fi
    # shellcheck disable=SC2086
    if OMP_NUM_THREADS=1 "$env/bin/python" -m pytest $TESTS -m "not slow" -p no:cacheprovider >"$env/tests.log" 2>&1; then
        echo "$name: $(tail -n 1 "$env/tests.log")"
    else
        echo "$name: FAILED ($env/tests.log)"; failed=1
    fi
}

for version in $PYTHONS; do
    python="python$version"
    for other in "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$version".*/bin/python; do
        if test -x "$other"; then python=$other; fi
    done
    if ! "$python" -c "import sys; assert '%d.%d' % sys.version_info[:2] == '$version'" >/dev/null 2>&1; then
        echo "$version: not installed here"; continue
    fi
    # shellcheck disable=SC2086
    run "$version-oldest" "$python" $OLDEST
    # shellcheck disable=SC2086
    run "$version-newest" "$python" $NEWEST
done
exit $failed
