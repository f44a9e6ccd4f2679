#!/bin/sh
# Installs Debian packages so that no service of the system's starts because of it, now or at the next boot.
# Must never leave behind what it put in place for that: the policy and the cluster setting are undone on every way out.
# Usage (as root): sh apt-install.sh PACKAGE...
set -eu
export DEBIAN_FRONTEND=noninteractive NEEDRESTART_SUSPEND=1 RUNLEVEL=1
policy=/usr/sbin/policy-rc.d
clusters=/etc/postgresql-common/createcluster.conf
policy_made='' clusters_saved=''

undo() {
  if [ -n "$policy_made" ]; then rm -f "$policy"; fi
  if [ -n "$clusters_saved" ]; then cat "$clusters_saved" >"$clusters"; rm -f "$clusters_saved"; fi
}
trap undo EXIT
trap 'exit 130' HUP INT TERM

installed() { dpkg-query -W -f '${db:Status-Status}\n' "$1" 2>/dev/null | grep -qx installed; }
fetch() { apt-get install -y --no-install-recommends -o DPkg::Lock::Timeout=300 "$@"; }

if [ -e "$policy" ]; then
  # Somebody's own policy is kept; one that would let the services start is a reason to leave the decision to its owner.
  code=0
  "$policy" rabbitmq-server start >/dev/null 2>&1 || code=$?
  if [ "$code" -ne 101 ]; then
    echo "$policy exists and would let new services start; install these packages yourself: $*" >&2
    exit 1
  fi
else
  policy_made=yes
  printf '#!/bin/sh\n# Temporary: holds back service starts while Daybook installs packages.\nexit 101\n' >"$policy"
  chmod 755 "$policy"
fi

# Units that these packages would enable for the next boot. One that was there before is not ours to change.
units=''
installed rabbitmq-server || units="$units rabbitmq-server.service"
installed erlang-base || units="$units epmd.service epmd.socket"

apt-get update -o DPkg::Lock::Timeout=300
case " $* " in
*" postgresql "*)
  # Its settings file must exist before a server package is unpacked, else that makes and starts a cluster on 5432.
  fetch postgresql-common
  saved=$(mktemp)
  cat "$clusters" >"$saved"
  clusters_saved=$saved
  sed -i -e '/^[[:space:]]*create_main_cluster/d' "$clusters"
  echo 'create_main_cluster = false' >>"$clusters"
  ;;
esac
fetch "$@"

for unit in $units; do
  if command -v systemctl >/dev/null 2>&1; then
    if [ -n "$(systemctl list-unit-files --no-legend "$unit" 2>/dev/null)" ]; then systemctl disable --quiet "$unit"; fi
  else
    # What that would do, for an init system that is only installed later.
    rm -f /etc/systemd/system/*.wants/"$unit"
    if [ -e "/etc/init.d/${unit%.service}" ]; then update-rc.d "${unit%.service}" disable; fi
  fi
done
