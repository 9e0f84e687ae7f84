#!/bin/sh
# Runs tests on an emulated machine with two memory nodes, two cores each, for machines that have one: that pages and threads know their
# node, and that updates begin with what is near. What it says about speed is nothing.
#
#     scripts/two-nodes.sh
#
# Boots a Debian kernel under QEMU (without KVM) with nothing but the tests. Debian packages that it needs:
#
#     apt-get install qemu-system-x86 cpio busybox-static
#
# The kernel's image is downloaded with `apt-get download` and not installed. TESTS holds other tests as crate:target:filter.
set -eu
cd "$(dirname "$0")/.."
work=${WORK:-target/two-nodes}
tests=${TESTS:-"terrace-optimizer:test=nodes: terrace-device:lib:memory_node"}
root=$work/root
rm -rf "$root"
mkdir -p "$root/bin" "$root/proc" "$root/sys" "$root/dev" "$root/tmp" "$root/tests"

if ! ls "$work"/kernel/boot/vmlinuz-* >/dev/null 2>&1; then
    image=$(apt-cache depends linux-image-cloud-amd64 | sed -n 's/.*Depends: \(linux-image-[^ ]*\).*/\1/p' | head -1)
    (cd "$work" && apt-get download "$image" && dpkg -x "$image"_*.deb kernel)
fi

for test in $tests; do
    IFS=: read -r crate target filter <<LINE
$test
LINE
    built=$(cargo test --release --no-run -p "$crate" "--$target" 2>&1 | sed -n 's/.*Executable.*(\(.*\))$/\1/p')
    name=$(basename "$built" | sed 's/-[0-9a-f]*$//')
    strip -o "$root/tests/$name" "$built"
    echo "$name $filter" >> "$root/tests.list"
    ldd "$built" | sed -n 's/.*=> \(\/[^ ]*\).*/\1/p; s/^\t\(\/lib64[^ ]*\).*/\1/p' | while read -r library; do
        mkdir -p "$root$(dirname "$library")"
        cp -L "$library" "$root$library"
    done
done

cp /bin/busybox "$root/bin/busybox"
cat > "$root/init" <<'INIT'
#!/bin/busybox sh
/bin/busybox mount -t proc proc /proc
/bin/busybox mount -t sysfs sys /sys
/bin/busybox mount -t devtmpfs dev /dev
echo "memory nodes: $(/bin/busybox cat /sys/devices/system/node/online)"
failed=0
while read -r name filter; do
    /tests/$name $filter --nocapture --test-threads 1 || failed=1
done < /tests.list
echo "two nodes: $([ $failed = 0 ] && echo passed || echo FAILED)"
/bin/busybox poweroff -f
INIT
chmod +x "$root/init"
(cd "$root" && find . | cpio --quiet -o -H newc | gzip -1) > "$work/initramfs.gz"

timeout 600 qemu-system-x86_64 -accel tcg -cpu max -smp 4 -m 1024 -nographic -no-reboot \
    -object memory-backend-ram,size=512M,id=m0 -object memory-backend-ram,size=512M,id=m1 \
    -numa node,cpus=0-1,memdev=m0 -numa node,cpus=2-3,memdev=m1 \
    -kernel "$(ls "$work"/kernel/boot/vmlinuz-* | head -1)" -initrd "$work/initramfs.gz" \
    -append "console=ttyS0 quiet panic=-1" | tee "$work/output"
grep -q "two nodes: passed" "$work/output"
