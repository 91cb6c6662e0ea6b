# Runs each line from the serial port of a guest with systemd, and reports its exit status.
mkdir -p /usr/local/bin
busybox --install -s /usr/local/bin
export PATH=/usr/local/bin:/usr/bin:/usr/sbin:/llama LD_LIBRARY_PATH=/llama HOME=/tmp
export SYSTEMD_COLORS=0 SYSTEMD_PAGER=
stty -echo
echo "@@ready"
while read -r line; do
    sh -c "$line" </dev/null
    echo "@@done $?"
done
