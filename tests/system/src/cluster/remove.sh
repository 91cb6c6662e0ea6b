# Removes the control groups that outer.sh has made, in a mount namespace of its own. $1 and $2 are
# its first arguments. Processes that were killed may need a moment to leave.
while IFS=: read -r number controllers path; do
    groups=$1/groups/$number
    case $controllers in
        name=*) continue ;;
        "") mount -t cgroup2 cgroup2 "$groups" ;;
        *) mount -t cgroup -o "$controllers" cgroup "$groups" ;;
    esac
    i=0
    while [ -d "$groups$path/$2" ] && [ $i -lt 100 ]; do
        find "$groups$path/$2" -depth -type d -exec rmdir {} + 2> /dev/null || sleep 0.1
        i=$((i + 1))
    done
done < "$1/membership"
