# Sourced by the other scripts: makes a virtual environment in .venv with the pinned dependencies. A second run takes a second.

install_drafttrain() {  # install_drafttrain [extras], e.g. install_drafttrain "[gguf,plots]"
  local extras="${1:-}" stamp
  if [ -n "${DRAFTTRAIN_INSTALLED:-}" ]; then  # the Python at hand has all packages, e.g. by PYTHONPATH
    drafttrain() { "${PYTHON:-python}" -m drafttrain "$@"; }
    return
  fi
  unset PYTHONDONTWRITEBYTECODE  # else every process compiles every module that it imports
  [ -x .venv/bin/python ] || "${PYTHON:-python3}" -m venv .venv
  # shellcheck disable=SC1091
  source .venv/bin/activate
  stamp=".venv/.installed-$(printf '%s' "$extras" "$(cat pyproject.toml constraints.txt)" | cksum | cut -d' ' -f1)"
  if [ ! -f "$stamp" ]; then
    echo "installing drafttrain$extras and its pinned dependencies into .venv"
    # The pip that comes with Python 3.11 takes twice as long to read an index's pages and to unpack wheels.
    python -m pip install --quiet --disable-pip-version-check "pip>=25"
    # Python compiles the third of the modules that are imported when they are; pip would compile all, one after the other.
    python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e ".$extras"
    touch "$stamp"
  fi
}

on_gpu() {  # whether torch computes on a CUDA device
  local python=python
  [ -z "${DRAFTTRAIN_INSTALLED:-}" ] || python="${PYTHON:-python}"
  "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'
}

install_engine() {  # install_engine FOLDER "PACKAGE ..." [the same torch as drafttrain's: yes]
  local env="$1" package="$2" torch="${3:-}" packages
  [ -f "$env/.ready" ] && return
  echo "installing $package into $env"
  [ -x "$env/bin/python" ] || "${PYTHON:-python3}" -m venv "$env"
  local install=("$env/bin/python" -m pip install --quiet --disable-pip-version-check)
  if [ -n "$torch" ]; then
    # vLLM needs other versions of most packages than drafttrain, but the same torch. The prebuilt media packages that it pulls
    # in are built for another torch.
    grep '^torch==' constraints.txt > "$env/constraints.txt"
    install+=(-c "$env/constraints.txt")
    "${install[@]}" torch
  fi
  read -ra packages <<< "$package"
  "${install[@]}" "${packages[@]}"
  [ -z "$torch" ] || "$env/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec >/dev/null 2>&1 || true
  touch "$env/.ready"
}
