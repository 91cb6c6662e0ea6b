# Runs as root in a minimal Debian system, in namespaces of its own. /packages/previous and
# /packages/new have the packages, /guest has a program with llama.cpp's libraries and a model.
# Prints one line for each step that is done, and ends with the first that fails.
set -eu
export DEBIAN_FRONTEND=noninteractive
count=24
long=400

# Waits until a condition holds.
await() {
    tries=0
    until eval "$1"; do
        tries=$((tries + 1))
        if [ $tries -gt 3000 ]; then
            echo "not within 300 s: $1" >&2
            exit 9
        fi
        sleep 0.1
    done
}

# Ends with what a program has written.
failed() {
    echo "$1" >&2
    shift
    tail -n 20 "$@" >&2
    exit 1
}

# All files but those of the test, of dpkg's own list, and the lists of users with their backups:
# users remain, as usual in Debian.
files() {
    find / -xdev \( -path /proc -o -path /sys -o -path /dev -o -path /run -o -path /tmp \
        -o -path /packages -o -path /guest -o -path /var/lib/dpkg -o -path /var/log \) -prune \
        -o -print | grep -v -x -E '/etc/(passwd|group|shadow|gshadow|subuid|subgid)-|/etc/.pwd.lock' \
        | LC_ALL=C sort
}

# Starts the installed executor with the installed configuration as vgpu.service does, and names
# its log.
serve() {
    log=/tmp/serve-$1
    install -d -o vgpu -g vgpu -m 755 /run/vgpu
    install -d -o vgpu -g vgpu -m 750 /var/cache/vgpu
    : > "$log.out"
    VGPU_CACHE=/var/cache/vgpu setpriv --reuid vgpu --regid vgpu --init-groups --no-new-privs \
        vgpu serve > "$log.out" 2> "$log.err" &
    server=$!
    await "grep -q '^ready' $log.out || ! kill -0 $server 2> /dev/null"
    grep -q '^ready unix:/run/vgpu/vgpu.sock' "$log.out" || failed "no executor" "$log.err"
}

# Starts the program $1 as a user of the group vgpu, with $2 layers on the device. It has the plugin
# that is installed now for as long as it runs.
guest() {
    mkfifo "/tmp/$1.in"
    sleep 100000 > "/tmp/$1.in" &
    : > "/tmp/$1.out"
    GGML_BACKEND_PATH=/usr/lib/vgpu/libggml-vgpu.so LD_LIBRARY_PATH=/guest \
        setpriv --reuid user --regid user --init-groups \
        /guest/retrying_guest /guest /guest/model.gguf "$2" \
        < "/tmp/$1.in" >> "/tmp/$1.out" 2> "/tmp/$1.err" &
    eval "program_$1=$!"
    await "grep -q '^ready' /tmp/$1.out || ! kill -0 $! 2> /dev/null"
    grep -q '^ready' "/tmp/$1.out" || failed "$1 does not start" "/tmp/$1.err"
}

# Asks the program $1 for $2 tokens.
begin() {
    : > "/tmp/$1.out"
    echo "run $2" > "/tmp/$1.in"
}

# Waits for the tokens of the program $1.
finish() {
    program=$(eval echo "\$program_$1")
    await "grep -q '^tokens\|^failed' /tmp/$1.out || ! kill -0 $program 2> /dev/null"
    grep '^tokens' "/tmp/$1.out" || failed "$1 has no tokens" "/tmp/$1.out" "/tmp/$1.err"
}

# The tokens must be those of the CPU.
compare() {
    [ "$1" = "$reference" ] || failed "$2: $1 instead of $reference" "$log.err"
}

# The executor has agreed on this version of the protocol with a program of this plugin.
agreed() {
    grep 'session opened' "$log.err" | grep -q "protocol=$1" ||
        failed "no session of protocol $1" "$log.err"
}

files > /tmp/before
dpkg --install /packages/previous/*.deb > /tmp/dpkg 2>&1 || failed "installing" /tmp/dpkg
echo "installed: $(vgpu --version)"
vgpu check-config > /tmp/check 2>&1 || failed "vgpu check-config" /tmp/check
useradd --no-create-home --groups vgpu user
serve previous
guest cpu 0
begin cpu $count
reference=$(finish cpu)
guest old 99
begin old $count
compare "$(finish old)" "the previous release alone"
echo "the previous release generates the CPU's text"

# Upgraded under a guest in the middle of a generation. The guest is stopped meanwhile: a small
# model generates all of its tokens in less time than an upgrade takes.
begin old $long
await "[ \$(grep -c '^token\$' /tmp/old.out) -ge 3 ]"
kill -STOP "$program_old"
if grep -q '^tokens' /tmp/old.out; then
    failed "the guest has generated everything before the upgrade" /tmp/old.out
fi
dpkg --install /packages/new/*.deb > /tmp/dpkg 2>&1 || failed "upgrading" /tmp/dpkg
kill -CONT "$program_old"
case $(finish old) in
    "$reference"*) ;;
    *) failed "the guest has lost its session by the upgrade" /tmp/old.err "$log.err" ;;
esac
kill -0 $server || failed "the executor has ended by the upgrade" "$log.err"
vgpu check-config > /tmp/check 2>&1 || failed "vgpu check-config" /tmp/check
echo "upgraded under a running guest: $(vgpu --version)"

# The new plugin and the executor of the previous release, which still runs.
guest ahead 99
begin ahead $count
compare "$(finish ahead)" "the new plugin on the previous executor"

kill $server
wait $server || failed "the executor has failed" "$log.err"
serve new
begin old $count
compare "$(finish old)" "the previous plugin on the new executor"
agreed 3
guest new 99
begin new $count
compare "$(finish new)" "the new release alone"
agreed 4
vgpu doctor --endpoint unix:/run/vgpu/vgpu.sock > /tmp/doctor 2>&1 ||
    failed "vgpu doctor" /tmp/doctor
echo "old and new guests on the new executor"

for program in "$program_cpu" "$program_old" "$program_ahead" "$program_new"; do
    kill "$program"
done
kill $server
wait $server || failed "the executor has failed" "$log.err"
userdel user
dpkg --purge vgpu-guest vgpu > /tmp/dpkg 2>&1 || failed "purging" /tmp/dpkg
files > /tmp/after
diff /tmp/before /tmp/after > /tmp/left || failed "files before and after" /tmp/left
[ ! -e /run/vgpu ] || failed "/run/vgpu is left" /tmp/dpkg
dpkg-query --show 'vgpu*' > /tmp/listed 2> /dev/null || true
[ ! -s /tmp/listed ] || failed "dpkg still lists packages" /tmp/listed
echo "purged"
