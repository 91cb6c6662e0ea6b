# Runs each line that comes through the serial port of a guest with systemd, and says with what status it ended.
mkdir -p /usr/local/bin
busybox --install -s /usr/local/bin
export PATH=/usr/local/bin:/usr/bin:/usr/sbin:/llama LD_LIBRARY_PATH=/llama HOME=/tmp SYSTEMD_COLORS=0 SYSTEMD_PAGER=
stty -echo
echo "@@ready"
while read -r line; do
    sh -c "$line" </dev/null
    echo "@@done $?"
done
