#!/bin/sh
# Installs Debian packages so that no service of the system's starts because of it, now or at the next boot.
# Must never leave behind what it put in place for that: the policy and the cluster setting are undone on every way out.
# Usage (as root): sh apt-install.sh PACKAGE...
set -eu
export DEBIAN_FRONTEND=noninteractive NEEDRESTART_SUSPEND=1 RUNLEVEL=1
policy=/usr/sbin/policy-rc.d
clusters=/etc/postgresql-common/createcluster.conf
policy_made='' clusters_saved='' stopped='' units=''

installed() { dpkg-query -W -f '${db:Status-Status}\n' "$1" 2>/dev/null | grep -qx installed; }

# Not started at the next boot either.
disable() {
  if command -v systemctl >/dev/null 2>&1; then
    if [ -n "$(systemctl list-unit-files --no-legend "$1" 2>/dev/null)" ]; then systemctl disable --quiet "$1"; fi
  else
    # What that would do, for an init system that is only installed later.
    rm -f /etc/systemd/system/*.wants/"$1"
    if [ -e "/etc/init.d/${1%.service}" ]; then update-rc.d "${1%.service}" disable; fi
  fi
}

finish() {
  code=$?
  set +e
  for unit in $units; do disable "$unit"; done
  if [ -n "$clusters_saved" ]; then
    # Empty when there was none: then there is none again.
    if [ -s "$clusters_saved" ]; then cat "$clusters_saved" >"$clusters"; else rm -f "$clusters"; fi
    rm -f "$clusters_saved"
  fi
  if [ -n "$policy_made" ]; then rm -f "$policy"; fi
  exit "$code"
}
trap finish EXIT
trap 'stopped=yes' HUP INT TERM

# Out of reach of a Ctrl-C: packages left half installed would be finished later by someone else, and start their services then.
fetch() {
  if [ -n "$stopped" ]; then exit 130; fi
  setsid --wait apt-get install -y --no-install-recommends -o DPkg::Lock::Timeout=300 "$@"
}

if [ -e "$policy" ]; then
  # Somebody's own policy is kept; one that would let the services start is a reason to leave the decision to its owner.
  answer=0
  "$policy" rabbitmq-server start >/dev/null 2>&1 || answer=$?
  if [ "$answer" -ne 101 ]; then
    echo "$policy exists and would let new services start; install these packages yourself: $*" >&2
    exit 1
  fi
else
  policy_made=yes
  printf '#!/bin/sh\n# Temporary: holds back service starts while Daybook installs packages.\nexit 101\n' >"$policy"
  chmod 755 "$policy"
fi

# Units that these packages would enable for the next boot. One that was there before is not ours to change.
if ! installed rabbitmq-server; then units="$units rabbitmq-server.service"; fi
if ! installed erlang-base; then units="$units epmd.service epmd.socket"; fi

apt-get update -o DPkg::Lock::Timeout=300
case " $* " in
*" postgresql "*)
  # Its settings must be there before a server package is unpacked, else that makes a cluster on 5432.
  fetch postgresql-common
  clusters_saved=$(mktemp)
  if [ -e "$clusters" ]; then
    cat "$clusters" >"$clusters_saved"
    sed -i -e '/^[[:space:]]*create_main_cluster/d' "$clusters"
  fi
  echo 'create_main_cluster = false' >>"$clusters"
  ;;
esac
fetch "$@"
if [ -n "$stopped" ]; then exit 130; fi
