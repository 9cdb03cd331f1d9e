# Source this: makes NCCL-EP and NIXL-EP importable from what lies in $PEERS (default .gpu). README.md says what that is.
#
# The NCCL there replaces torch's in this shell's processes; the first dispatch of a shape compiles with nvcc.
PEERS=${PEERS:-.gpu}
_site=${PEERS_SITE:-/tmp/moefleet-peers}
_python=${PYTHON:-python3}

_unpack() {  # _unpack FOLDER: every zip and site.tar.xz in it
  local each
  for each in "$1"/*.zip; do [ -e "$each" ] && "$_python" -m zipfile -e "$each" "$_site"; done
  [ ! -e "$1/site.tar.xz" ] || tar -xJf "$1/site.tar.xz" -C "$_site"
}

if [ ! -e "$_site/ready" ]; then
  mkdir -p "$_site/nccl_home/lib" "$_site/jit_include"
  [ ! -d "$PEERS/nixl_ep" ] || _unpack "$PEERS/nixl_ep"
  if [ -e "$PEERS/nccl_ep/libnccl.so.2.xz" ]; then
    _unpack "$PEERS/nccl_ep"
    xz -dc "$PEERS/nccl_ep/libnccl.so.2.xz" >"$_site/nccl_home/lib/libnccl.so.2"
    tar -xJf "$PEERS/nccl_ep/nccl_include.tar.xz" -C "$_site/nccl_home"
    cp -r "$_site"/nccl_home/include/* "$_site"/nccl/ep/include/* "$_site/jit_include"
  fi
  touch "$_site/ready"
fi

export PYTHONPATH="${PYTHONPATH:+$PYTHONPATH:}$_site"
if [ -e "$_site/nccl_home/lib/libnccl.so.2" ]; then
  export LD_PRELOAD="$_site/nccl_home/lib/libnccl.so.2${LD_PRELOAD:+:$LD_PRELOAD}"
  export LD_LIBRARY_PATH="$_site/nccl_home/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
  export CPATH="$_site/jit_include" NCCL_EP_JIT_BUILD_INCLUDE_DIR="$_site/jit_include"
  export NCCL_EP_JIT_SOURCE_DIR="$_site/nccl/ep/include/nccl_ep" NCCL_EP_JIT_CUDA_INCLUDE_DIR=/usr/local/cuda/include
  NCCL_EP_JIT_NVCC=$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)
  export NCCL_EP_JIT_NVCC
fi
