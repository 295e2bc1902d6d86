# Sourced by quickstart.sh and test.sh: `ensure_environment run|test` makes the Python environment if it is
# missing or out of date, and sets PYTHON. The second time it only compares a stamp.
#
#   MEGATRON_ND_VENV   folder of the virtual environment (default: .venv in the repository)
#   TORCH_INDEX_URL    package index to take PyTorch from (default: pip's own), for instance PyTorch's CPU index
#
# A Python that already has PyTorch >= 2.11 (an NGC container, say) is used as it is: the virtual environment
# then sees its packages, none of them is changed, and only what is missing is added, unpinned.

REPOSITORY_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
CONSTRAINTS="$REPOSITORY_ROOT/requirements/constraints-cpu.txt"
TRANSFORMER_ENGINE_WHEEL="transformer_engine==2.20.2" # its pure-Python part, for tests on CPU

say() { printf '%s\n' "$*" >&2; }

# Prints the comment at the top of the calling script.
show_usage() { sed -n '2,/^set /{/^set /!p}' "$0" | sed 's/^# \{0,1\}//'; }

# Runs "$@" with its output in the log; shows one line with the time it took, or the end of the log.
_step() {
    local title="$1" start=$SECONDS
    shift
    printf '  %-52s' "$title" >&2
    if "$@" >>"$ENVIRONMENT_LOG" 2>&1; then
        printf '%4d s\n' $((SECONDS - start)) >&2
    else
        printf 'failed\n' >&2
        grep -v 'is ignored: it is neither a file' "$ENVIRONMENT_LOG" | tail -n 15 >&2
        say "The whole log: $ENVIRONMENT_LOG"
        return 1
    fi
}

_stamp() {
    cd "$REPOSITORY_ROOT" || return 1
    { cat "$CONSTRAINTS" setup.py scripts/env.sh && ls megatron/*/__init__.py; } | cksum
}

_has_torch() {
    "$1" -c 'import torch, sys; sys.exit(tuple(map(int, torch.__version__.split(".")[:2])) < (2, 11))' 2>/dev/null
}

_base_python() {
    local candidate
    for candidate in python3 python python3.13 python3.12 python3.11 python3.10; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            command -v "$candidate"
            return 0
        fi
    done
    say "No Python >= 3.10 found on PATH: install one (with its venv module), or activate an environment that has it."
    return 1
}

_make_venv() {
    local base
    base="$(_base_python)" || return 1
    if ! _has_torch "$base"; then
        _step "making a virtual environment" "$base" -m venv "$1"
        return
    fi
    say "  using the PyTorch that comes with $base"
    unset PIP_CONSTRAINT # NGC's list for its own image; _write_constraints keeps what is installed
    _step "making a virtual environment" "$base" -m venv --system-site-packages "$1" || return 1
    # An environment made from another virtual environment sees that one's base only.
    "$base" -c 'import sysconfig as s; print("\n".join({s.get_path("purelib"), s.get_path("platlib")}))' \
        >"$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/the_python_with_torch.pth"
}

# Constraints for this environment: ours, or, beside a container's packages, that its PyTorch stays as it is.
_write_constraints() {
    "$PYTHON" - "$CONSTRAINTS" "$1" <<'PY'
import sys
from importlib import metadata

ours, target = sys.argv[1:]
lines = [line.strip() for line in open(ours) if line.strip() and not line.startswith("#")]
outside = [path for path in sys.path if path.endswith("-packages") and not path.startswith(sys.prefix)]
# The first on the path is what counts, so it is written last.
found = {d.metadata["Name"].lower(): d.version for d in reversed(list(metadata.distributions(path=outside)))}
if "torch" in found:
    built_with_it = ("torch", "numpy", "triton", "nvidia", "transformer", "flash", "apex", "setuptools")
    lines = [f"{name}=={version}" for name, version in found.items() if name.startswith(built_with_it)]
elif sys.version_info < (3, 11):  # the pinned releases need 3.11
    lines = [line for line in lines if line.startswith("torch==")]
open(target, "w").write("\n".join(lines) + "\n")
PY
}

_install_torch() {
    local version index=()
    version="$(grep '^torch==' "$CONSTRAINTS")"
    if [ -n "${TORCH_INDEX_URL:-}" ]; then
        index=(--index-url "$TORCH_INDEX_URL")
    elif [ "$(uname -s)" = Linux ] && ! command -v nvidia-smi >/dev/null; then
        say "  (no GPU here; TORCH_INDEX_URL can name PyTorch's CPU index, whose package is the smaller one)"
    fi
    _step "installing PyTorch" "$PYTHON" -m pip install ${index[@]+"${index[@]}"} "$version"
}

_install_packages() {
    local level="$1" extras="" constraints="$VIRTUAL_ENVIRONMENT/constraints.txt"
    [ "$level" = test ] && extras="[hf,wandb,dev]"
    _has_torch "$PYTHON" || _install_torch || return 1
    _write_constraints "$constraints" || return 1
    _step "installing build tools" "$PYTHON" -m pip install -c "$constraints" setuptools wheel || return 1
    _step "installing this project and what it needs" "$PYTHON" -m pip install -c "$constraints" \
        --no-build-isolation -e "$REPOSITORY_ROOT$extras" || return 1
    if [ "$level" = test ] && ! "$PYTHON" -c 'import importlib.metadata as m; m.version("transformer_engine")' 2>/dev/null; then
        _step "installing Transformer Engine's Python part" "$PYTHON" -m pip install --no-deps "$TRANSFORMER_ENGINE_WHEEL"
    fi
}

ensure_environment() {
    local level="$1" stamp known
    VIRTUAL_ENVIRONMENT="${MEGATRON_ND_VENV:-$REPOSITORY_ROOT/.venv}"
    ENVIRONMENT_LOG="$VIRTUAL_ENVIRONMENT/install.log"
    PYTHON="$VIRTUAL_ENVIRONMENT/bin/python"
    stamp="$(_stamp)"
    for known in "$level" test; do # an environment for tests is good for running, too
        if [ -x "$PYTHON" ] && [ "$(cat "$VIRTUAL_ENVIRONMENT/stamp-$known" 2>/dev/null)" = "$stamp" ]; then
            return 0
        fi
    done
    say "Preparing the Python environment in $VIRTUAL_ENVIRONMENT (once):"
    # Byte-compiling all of PyTorch takes longer than anything else here, and Python does it as needed.
    export PIP_NO_COMPILE=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PIP_ROOT_USER_ACTION=ignore
    mkdir -p "$VIRTUAL_ENVIRONMENT"
    if [ ! -x "$PYTHON" ]; then
        _make_venv "$VIRTUAL_ENVIRONMENT" || return 1
    fi
    _install_packages "$level" || return 1
    printf '%s\n' "$stamp" >"$VIRTUAL_ENVIRONMENT/stamp-$level"
}
