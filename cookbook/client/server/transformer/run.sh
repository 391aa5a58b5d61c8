#!/bin/sh
# With another file or more options: ./run.sh -c FILE --port 9000 --data-dir /var/lib/twinkle --no-wait
exec twinkle-server launch -c "$(dirname "$0")/server_config.yaml" "$@"
