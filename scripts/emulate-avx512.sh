#!/bin/sh
# Runs test executables on an emulated processor with AVX-512 (F, BW, CD, DQ, VL), for machines that have none.
#
#     scripts/emulate-avx512.sh [CRATE]...        default: terrace-optimizer terrace-kernels
#
# Builds the crates' tests in release mode, boots a Debian kernel under Bochs with nothing but them, and prints their output. It
# is slow. Debian packages that it needs:
#
#     apt-get install bochs bochsbios vgabios grub-pc-bin grub-common xorriso mtools cpio busybox-static
#
# The kernel's image is downloaded with `apt-get download` and not installed.
set -eu
cd "$(dirname "$0")/.."
work=${WORK:-target/emulate-avx512}
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
    /tests/"$name" --test-threads 1
    echo "EMULATED $name exit $?"
done < /tests.list
echo EMULATED end
/bin/busybox poweroff -f
INIT
chmod +x "$root/init"
(cd "$root" && find . | cpio -o -H newc --quiet | gzip -1) > "$work/iso/boot/initrd.gz"
cp "$work"/kernel/boot/vmlinuz-* "$work/iso/boot/vmlinuz"
# Bochs 2.7 reports sizes of compacted XSAVE areas that Linux finds inconsistent, and then Linux does without AVX: bits 321, 323
# and 515 are XSAVEC, XSAVES and PKU.
cat > "$work/iso/boot/grub/grub.cfg" <<'GRUB'
set timeout=0
menuentry tests {
    linux /boot/vmlinuz console=ttyS0 quiet nosmp noapic mitigations=off clearcpuid=321,323,515
    initrd /boot/initrd.gz
}
GRUB
grub-mkrescue -o "$work/tests.iso" "$work/iso" 2>/dev/null
cat > "$work/bochsrc" <<BOCHS
display_library: rfb, options="timeout=0"
megs: 1024
cpu: model=corei7_skylake_x, count=1, ips=200000000
romimage: file=/usr/share/bochs/BIOS-bochs-latest
vgaromimage: file=/usr/share/bochs/VGABIOS-lgpl-latest
ata0-master: type=cdrom, path=$work/tests.iso, status=inserted
boot: cdrom
com1: enabled=1, mode=file, dev=$work/serial.txt
clock: sync=none
log: $work/bochs.log
BOCHS
# The command for builds with a debugger, which otherwise wait for one.
echo c > "$work/commands"
rm -f "$work/serial.txt"
timeout "${SECONDS_MAX:-7200}" bochs -q -f "$work/bochsrc" -rc "$work/commands" > "$work/bochs.out" 2>&1 || true
cat "$work/serial.txt"
grep -aq 'EMULATED avx512' "$work/serial.txt" || { echo "the emulated processor has no AVX-512" >&2; exit 1; }
grep -aq 'EMULATED end' "$work/serial.txt" || { echo "the run did not end" >&2; exit 1; }
if grep -a 'EMULATED .* exit [1-9]' "$work/serial.txt" >&2; then exit 1; fi
