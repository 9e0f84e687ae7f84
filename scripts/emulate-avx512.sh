#!/bin/sh
# Runs test executables on an emulated processor with AVX-512 (F, BW, CD, DQ, VL; also BF16), for machines that have none.
#
#     scripts/emulate-avx512.sh [CRATE]...        default: terrace-optimizer terrace-kernels
#
# Builds the crates' tests in release mode, boots a Debian kernel under Bochs with nothing but them, and prints their output. It
# is slow. Debian packages that it needs:
#
#     apt-get install bochs bochsbios vgabios grub-pc-bin grub-common xorriso mtools cpio busybox-static
#
# The kernel's image is downloaded with `apt-get download` and not installed.
#
# BOCHS names another emulator than the installed one; from version 3 on it has AVX512-BF16 too, and more. Debian 12 has 2.7; the
# source of 3.0 is in Debian 13 (`apt-get source bochs`), and builds in minutes:
#
#     ./configure --enable-cpu-level=6 --enable-x86-64 --enable-avx --enable-evex --enable-amx --enable-all-optimizations \
#         --enable-long-phy-address --enable-pci --disable-docbook --with-nogui && make
#
# BIOS and VGABIOS name its images, by default the installed ones; version 3 was run with the BIOS of its own package. FILTER holds
# arguments for the tests, for example 'gemm matmul:: quantized:: --include-ignored'.
set -eu
cd "$(dirname "$0")/.."
work=${WORK:-target/emulate-avx512}
bochs=${BOCHS:-bochs}
filter=${FILTER:-}
# Features that Bochs does not have as Linux expects them, by their numbers in Linux. 2.7 reports sizes of compacted XSAVE areas that
# Linux finds inconsistent, and then Linux does without AVX: 321, 323 and 515 are XSAVEC, XSAVES and PKU.
kernel=clearcpuid=321,323,515
model=corei7_skylake_x
display='rfb, options="timeout=0"'
if "$bochs" --help cpu 2>&1 | grep -q sapphire_rapids; then
    # Half of AMX's state, system management mode under five-level paging, and more. These were enough; not each may be needed.
    kernel="$kernel,600,324,517,596,519,590,514,298,580 no5lvl nokaslr lpj=1000000 idle=halt tsc=reliable"
    model=sapphire_rapids
    display=nogui
fi
[ $# -gt 0 ] || set -- terrace-optimizer terrace-kernels
root=$work/root
rm -rf "$root" "$work/iso"
mkdir -p "$root/bin" "$root/lib64" "$root/proc" "$root/sys" "$root/dev" "$root/tmp" "$root/tests" "$root$PWD" "$work/iso/boot/grub"

if ! ls "$work"/kernel/boot/vmlinuz-* >/dev/null 2>&1; then
    image=$(apt-cache depends linux-image-amd64 | sed -n 's/.*Depends: \(linux-image-[^ ]*\).*/\1/p' | head -1)
    (cd "$work" && apt-get download "$image" && dpkg -x "$image"_*.deb kernel)
fi

for crate in "$@"; do
    cargo test --release --no-run -p "$crate" 2>&1 | sed -n 's/.*Executable.*(\(.*\))$/\1/p' | while read -r test; do
        name=$(basename "$test" | sed 's/-[0-9a-f]*$//')
        strip -o "$root/tests/$name" "$test"
        directory=$PWD/${crate#terrace-}
        printf '%s %s\n' "$name" "$directory" >> "$root/tests.list"
        # Tests read their fixtures by absolute path.
        [ ! -d "$directory/tests/fixtures" ] || { mkdir -p "$root$directory/tests"; cp -r "$directory/tests/fixtures" "$root$directory/tests/"; }
        mkdir -p "$root$directory"
        ldd "$test" | sed -n 's/.*=> \(\/[^ ]*\).*/\1/p; s/^\t\(\/lib64[^ ]*\).*/\1/p' | while read -r library; do
            mkdir -p "$root$(dirname "$library")"
            cp -L "$library" "$root$library"
        done
    done
done

[ -s "$root/tests.list" ] || { echo "no tests were built of: $*" >&2; exit 1; }
cp "$(command -v busybox)" "$root/bin/busybox"
cat > "$root/init" <<'INIT'
#!/bin/busybox sh
/bin/busybox mount -t proc proc /proc
/bin/busybox mount -t devtmpfs dev /dev
/bin/busybox mount -t tmpfs tmp /tmp
exec > /dev/ttyS0 2>&1
echo "EMULATED $(/bin/busybox grep -m1 flags /proc/cpuinfo | /bin/busybox tr ' ' '\n' | /bin/busybox grep avx512 | /bin/busybox tr '\n' ' ')"
while read -r name directory; do
    cd "$directory"
    /tests/"$name" --test-threads 1 FILTER
    echo "EMULATED $name exit $?"
done < /tests.list
echo EMULATED end
# What was written to the serial line takes a while to leave.
/bin/busybox sleep 5
/bin/busybox poweroff -f
INIT
sed -i "s/ FILTER\$/ $filter/" "$root/init"
chmod +x "$root/init"
(cd "$root" && find . | cpio -o -H newc --quiet | gzip -1) > "$work/iso/boot/initrd.gz"
cp "$work"/kernel/boot/vmlinuz-* "$work/iso/boot/vmlinuz"
cat > "$work/iso/boot/grub/grub.cfg" <<GRUB
set timeout=0
menuentry tests {
    linux /boot/vmlinuz console=ttyS0 quiet nosmp noapic mitigations=off $kernel
    initrd /boot/initrd.gz
}
GRUB
grub-mkrescue -o "$work/tests.iso" "$work/iso" 2>/dev/null
cat > "$work/bochsrc" <<BOCHS
display_library: $display
megs: 1024
cpu: model=$model, count=1, ips=200000000
romimage: file=${BIOS:-/usr/share/bochs/BIOS-bochs-latest}
vgaromimage: file=${VGABIOS:-/usr/share/bochs/VGABIOS-lgpl-latest}
ata0-master: type=cdrom, path=$work/tests.iso, status=inserted
boot: cdrom
com1: enabled=1, mode=file, dev=$work/serial.txt
clock: sync=none
log: $work/bochs.log
BOCHS
# Builds with a debugger wait for a command; others have no -rc.
echo c > "$work/commands"
commands=
if "$bochs" --help 2>&1 | grep -q -- '-rc'; then commands="-rc $work/commands"; fi
rm -f "$work/serial.txt"
# shellcheck disable=SC2086
timeout "${SECONDS_MAX:-7200}" "$bochs" -q -f "$work/bochsrc" $commands < /dev/null > "$work/bochs.out" 2>&1 || true
cat "$work/serial.txt"
grep -aq 'EMULATED avx512' "$work/serial.txt" || { echo "the emulated processor has no AVX-512" >&2; exit 1; }
grep -aq 'EMULATED end' "$work/serial.txt" || { echo "the run did not end" >&2; exit 1; }
if grep -a 'EMULATED .* exit [1-9]' "$work/serial.txt" >&2; then exit 1; fi
