#!/bin/sh
# Runs the C kernels with real AVX-512 instructions, on a machine that need not have them: harness.c says what is
# compared; here it is built, put into a Linux guest as its first process, and booted in the emulator Bochs.
#
#   tools/avx512/run.sh WORK VMLINUZ     in the emulator: about two minutes of CPU time to boot, one for the tests
#   tools/avx512/run.sh WORK             on this CPU with the vectors it has: shows quickly that the harness is right
#
# WORK is a folder for what is made. VMLINUZ is a Linux kernel with DEVTMPFS and the 8250 serial console built in, as
# Debian's are: `apt-get download linux-image-amd64`'s dependency, unpacked by `dpkg -x`, has it in boot/; nothing else
# of it is needed. Debian packages: gcc binutils bochs bochsbios vgabios isolinux syslinux-common genisoimage cpio.
#
# SOURCES (folder of the kernels), CC, MARCH, MODEL (of `bochs --help cpu`), LIMIT (seconds) may be set in the
# environment. Ends with 0 if the harness says PASS.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
work=${1:?usage: run.sh WORK [VMLINUZ]}
vmlinuz=${2:-}
sources=$(cd "${SOURCES:-$here/../../src/heart_attention/kernels/csrc}" && pwd)
cc=${CC:-gcc}
model=${MODEL:-corei7_skylake_x}
limit=${LIMIT:-7200}
if [ -n "$vmlinuz" ]; then
    march=${MARCH:-skylake-avx512}
    [ -r "$vmlinuz" ] || { echo "cannot read $vmlinuz" >&2; exit 2; }
else
    march=${MARCH:-native}
fi
mkdir -p "$work/iso/isolinux"
[ -z "$vmlinuz" ] || cp "$vmlinuz" "$work/iso/vmlinuz"
cd "$work"

# All kernels in one object whose names begin with $1; the other arguments are compiler flags.
build() {
    name=$1
    shift
    objects=
    for source in "$sources"/*.c; do
        object=$name-$(basename "$source" .c).o
        $cc "$@" -std=gnu11 -fopenmp -c -o "$object" "$source"
        objects="$objects $object"
    done
    ld -r -o "$name.o" $objects
    nm -g --defined-only "$name.o" | awk -v name="$name" '{ print $3, name "_" $3 }' > "$name.names"
    objcopy --redefine-syms="$name.names" "$name.o"
}

build fast -O3 -march="$march" # as build.py does, -march=native apart
build plain -O2 -mno-avx
floats=$($cc -march="$march" -dM -E -x c /dev/null |
    awk '/__AVX__/ && n < 8 { n = 8 } /__AVX512F__/ { n = 16 } END { print n ? n : 4 }')
# The structs are declared in the C files only: taken from there, they cannot go stale.
sed -n '/^struct \(tensor\|heart_[a-z]*\) {$/,/^};$/p' "$sources"/cpu.c "$sources"/backward.c "$sources"/predict.c \
    "$sources"/kmeans.c > structs.h
# Static, because the guest has no libraries; the linker warns about dlopen in OpenMP, which nothing here calls.
$cc -O2 -std=gnu11 -Wall -Wextra -fopenmp -static -DFLOATS="$floats" -I. -o harness "$here/harness.c" fast.o plain.o \
    -lm 2> link.txt || { cat link.txt >&2; exit 2; }
wide() { objdump -d "$1" | grep -c %zmm || true; }
echo "instructions with zmm registers: fast $(wide fast.o), plain $(wide plain.o)"

if [ -z "$vmlinuz" ]; then
    GOMP_SPINCOUNT=0 exec ./harness
fi

# A CD with the kernel and an initial file system that holds nothing but the harness.
cp harness init
echo init | cpio -o -H newc --quiet | gzip > iso/initrd
cp /usr/lib/ISOLINUX/isolinux.bin /usr/lib/syslinux/modules/bios/ldlinux.c32 iso/isolinux/
# One CPU and a known clock, so that nothing is probed for; a quick serial line, because its pace is emulated too.
# clearcpuid: Bochs 2.7 reports a wrong size for the compacted state of the registers (XSAVEC, XSAVES), for which Linux
# would switch off AVX altogether; without these two it saves the registers in the old form.
# GOMP_SPINCOUNT ends up in the harness' environment: on one CPU a thread that waits must not spin.
options="console=ttyS0,115200 loglevel=5 panic=-1 nokaslr nosmp mitigations=off tsc=reliable no_timer_check"
options="$options lpj=1000000 clearcpuid=321,323 GOMP_SPINCOUNT=0"
cat > iso/isolinux/isolinux.cfg <<END
DEFAULT linux
PROMPT 0
TIMEOUT 1
LABEL linux
KERNEL /vmlinuz
APPEND initrd=/initrd $options
END
chmod -R u+w iso
genisoimage -quiet -o boot.iso -b isolinux/isolinux.bin -c isolinux/boot.cat -no-emul-boot -boot-load-size 4 \
    -boot-info-table iso

# ips ties the guest's clock to instructions: the fewer to a second, the shorter all waits during the boot.
cat > bochsrc <<END
cpu: model=$model, count=1, ips=10000000, reset_on_triple_fault=0
clock: sync=none, time0=utc
memory: guest=512, host=512
romimage: file=\$BXSHARE/BIOS-bochs-latest
vgaromimage: file=\$BXSHARE/VGABIOS-lgpl-latest
ata0: enabled=1
ata0-master: type=cdrom, path=boot.iso, status=inserted
boot: cdrom
display_library: rfb, options="timeout=0"
com1: enabled=1, mode=file, dev=serial.txt
log: bochs.log
panic: action=fatal
error: action=ignore
info: action=ignore
END
echo continue > commands # Debian's Bochs has the debugger built in, which waits for this
rm -f serial.txt
began=$(date +%s)
BXSHARE=${BXSHARE:-/usr/share/bochs} bochs -q -f bochsrc -rc commands < /dev/null > bochs.txt 2>&1 &
bochs=$!
trap 'kill $bochs 2> /dev/null || true' EXIT
trap 'exit 1' INT TERM
while kill -0 $bochs 2> /dev/null && [ $(($(date +%s) - began)) -lt "$limit" ]; do
    if grep -q '^END' serial.txt 2> /dev/null; then break; fi
    sleep 2
done
echo "emulated a $model for $(($(date +%s) - began)) seconds"
[ -e serial.txt ] || { echo "the guest printed nothing: see $work/bochs.txt" >&2; exit 1; }
tr -d '\r' < serial.txt | sed -n '/^BEGIN/,$p'
tr -d '\r' < serial.txt | grep -q '^PASS$' || { echo "see $work/serial.txt and $work/bochs.txt" >&2; exit 1; }
