#!/bin/sh
# Prints the path of a Python 3.12 or newer that can make virtual environments, or says in one line why none will do
# and ends with 2. $PYTHON, when set, is the only candidate.

set -f
seen=
no_venv=

# try PATH: prints PATH and ends the script when it will do. A pyenv shim exists even for a version that will not run.
try() {
    [ -x "$1" ] || return 0
    found=$("$1" -c '
import sys
fits = sys.version_info >= (3, 12)
try:
    import ensurepip, venv
except ImportError:
    fits = fits and None
# An environment, perhaps the one to be built anew, stands on another interpreter.
base = getattr(sys, "_base_executable", None) if sys.prefix != getattr(sys, "base_prefix", sys.prefix) else None
print({True: "yes", None: "no-venv", False: "old"}[fits], "%d.%d.%d" % sys.version_info[:3], base or "")
' 2>/dev/null </dev/null) || return 0
    case $found in
    yes\ *)
        base=${found#yes * }
        printf '%s\n' "${base:-$1}"
        exit 0
        ;;
    no-venv\ *) found=${found#* } no_venv=${no_venv:-"$1 (${found%% *})"} ;;
    old\ *) found=${found#* } seen="$seen${seen:+, }$1 (${found%% *})" ;;
    esac
}

if [ -n "${PYTHON:-}" ]; then
    candidate=$(command -v "$PYTHON") && try "$candidate"
else
    old_ifs=$IFS
    for name in python3 python3.14 python3.13 python3.12; do
        IFS=:
        for folder in $PATH; do
            IFS=$old_ifs
            try "$folder/$name"
        done
        IFS=$old_ifs
    done
    # The newest first; names like 3.14.0rc1, 3.13.0t and pypy3.11 are left out, since few wheels are built for them.
    root=${PYENV_ROOT:-$HOME/.pyenv}
    for version in $(ls "$root/versions" 2>/dev/null | grep -E '^3\.[0-9]+\.[0-9]+$' | sort -t. -k2,2nr -k3,3nr); do
        try "$root/versions/$version/bin/python3"
    done
fi

if [ -n "$no_venv" ]; then
    echo "error: $no_venv cannot make a virtual environment; install its venv package (Debian: python3-venv)" >&2
else
    echo "error: Python 3.12 or newer is needed, found ${seen:-none}; install one, or name it with PYTHON=/path/to/python3" >&2
fi
exit 2
