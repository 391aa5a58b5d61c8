#!/bin/sh
# Start a Ray cluster on this machine, unless one runs already, and a server on it.
set -eu

usage() {
  cat <<'USAGE'
usage: run.sh [options] [options of `twinkle-server launch`]

  --head GPUS           GPUs of the cluster's head, such as 0,1,2,3 (default: all of this machine; none: '')
  --gpu-workers LISTS   more nodes of the cluster on this machine, with these GPUs: '4,5;6,7' are two nodes
  --cpu-workers N       more nodes without GPUs (default: 0)
  --temp-dir DIR        where Ray keeps sockets and logs (default: Ray's own, /tmp/ray)
  --save-dir DIR        where the server keeps its data (default: data_dir of the file)
  --server-config FILE  the server's configuration (default: server_config.yaml beside this script)
  --restart             first end all of Ray on this machine, with the server on it
  --help                show this text

Ray's head listens on port 6379, or on RAY_PORT. The server needs no Redis: its state is a file in its data
directory, or the database that persistence.url names. cookbook/observability has dashboards.
USAGE
}

config="$(dirname "$0")/server_config.yaml"
head=all workers='' cpu_workers=0 temp_dir='' save_dir='' restart=no
port="${RAY_PORT:-6379}"

while [ $# -gt 0 ]; do
  case "$1" in
    --help | -h) usage; exit 0 ;;
    --restart) restart=yes; shift; continue ;;
    --head | --gpu-workers | --cpu-workers | --temp-dir | --save-dir | --server-config) ;;
    *) break ;; # from here on, options of launch
  esac
  [ $# -gt 1 ] || { echo "run.sh: $1 needs a value; see --help" >&2; exit 2; }
  case "$1" in
    --head) head="$2" ;;
    --gpu-workers) workers="$2" ;;
    --cpu-workers) cpu_workers="$2" ;;
    --temp-dir) temp_dir="$2" ;;
    --save-dir) save_dir="$2" ;;
    --server-config) config="$2" ;;
  esac
  shift 2
done
[ -f "$config" ] || { echo "run.sh: --server-config: got $config, allowed: a file that exists" >&2; exit 2; }
case "$cpu_workers" in '' | *[!0-9]*) echo "run.sh: --cpu-workers: got $cpu_workers, allowed: a number" >&2; exit 2 ;; esac

# Start a node of the cluster. The first argument lists its GPUs, or is "all"; the others are for `ray start`.
start_node() {
  gpus="$1"
  shift
  if [ "$gpus" = all ]; then
    ray start "$@"
  elif [ -z "$gpus" ]; then
    CUDA_VISIBLE_DEVICES='' ray start --num-gpus 0 "$@"
  else
    CUDA_VISIBLE_DEVICES="$gpus" ray start --num-gpus "$(echo "$gpus" | tr ',' '\n' | grep -c .)" "$@"
  fi
}

[ "$restart" = no ] || ray stop
export RAY_ADDRESS="127.0.0.1:$port"
if ray status >/dev/null 2>&1; then
  echo "run.sh: the server joins the Ray cluster at $RAY_ADDRESS"
else
  start_node "$head" --head --port "$port" ${temp_dir:+--temp-dir "$temp_dir"}
  rest="$workers;"
  while [ -n "${rest#;}" ]; do
    start_node "${rest%%;*}" --address "$RAY_ADDRESS"
    rest="${rest#*;}"
  done
  while [ "$cpu_workers" -gt 0 ]; do
    start_node '' --address "$RAY_ADDRESS"
    cpu_workers=$((cpu_workers - 1))
  done
fi
exec twinkle-server launch -c "$config" ${save_dir:+--data-dir "$save_dir"} "$@"
