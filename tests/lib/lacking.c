/* Make one capability of the file system below $LACKING_ROOT fail with the errno in $LACKING_ERRNO.

   LACKING names the capability: sync_folder, link (hard links), noreplace (hard links and renameat2), reserve, direct,
   flock, mmap (of files).
   Preload it into a process. Calls on other paths reach the C library unchanged. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static int lacks(const char *capability, const char *path) {
    const char *root = getenv("LACKING_ROOT"), *lacking = getenv("LACKING");
    return root && lacking && strstr(lacking, capability) && strncmp(path, root, strlen(root)) == 0;
}

static int fail(void) {
    errno = atoi(getenv("LACKING_ERRNO"));
    return -1;
}

static int path_of(int fd, char *path) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t size = readlink(link, path, PATH_MAX - 1);
    path[size < 0 ? 0 : size] = 0;
    return size > 0;
}

int fsync(int fd) {
    static int (*real)(int);
    struct stat found;
    char path[PATH_MAX];
    if (!real) real = dlsym(RTLD_NEXT, "fsync");
    if (fstat(fd, &found) == 0 && S_ISDIR(found.st_mode) && path_of(fd, path) && lacks("sync_folder", path)) return fail();
    return real(fd);
}

int linkat(int a, const char *from, int b, const char *to, int flags) {
    static int (*real)(int, const char *, int, const char *, int);
    if (!real) real = dlsym(RTLD_NEXT, "linkat");
    return lacks("link", to) || lacks("noreplace", to) ? fail() : real(a, from, b, to, flags);
}

int renameat2(int a, const char *from, int b, const char *to, unsigned flags) {
    static int (*real)(int, const char *, int, const char *, unsigned);
    if (!real) real = dlsym(RTLD_NEXT, "renameat2");
    return flags && lacks("noreplace", to) ? fail() : real(a, from, b, to, flags);
}

int posix_fallocate(int fd, off_t start, off_t size) {
    static int (*real)(int, off_t, off_t);
    char path[PATH_MAX];
    if (!real) real = dlsym(RTLD_NEXT, "posix_fallocate");
    if (path_of(fd, path) && lacks("reserve", path)) return atoi(getenv("LACKING_ERRNO"));
    return real(fd, start, size);
}
int posix_fallocate64(int fd, off_t start, off_t size) { return posix_fallocate(fd, start, size); }

int flock(int fd, int operation) {
    static int (*real)(int, int);
    char path[PATH_MAX];
    if (!real) real = dlsym(RTLD_NEXT, "flock");
    return path_of(fd, path) && lacks("flock", path) ? fail() : real(fd, operation);
}

void *mmap(void *at, size_t size, int access, int flags, int fd, off_t start) {
    static void *(*real)(void *, size_t, int, int, int, off_t);
    char path[PATH_MAX];
    if (!real) real = dlsym(RTLD_NEXT, "mmap");
    if (fd >= 0 && path_of(fd, path) && lacks("mmap", path)) return fail(), MAP_FAILED;
    return real(at, size, access, flags, fd, start);
}
void *mmap64(void *at, size_t size, int access, int flags, int fd, off_t start) {
    return mmap(at, size, access, flags, fd, start);
}

static int opened(const char *name, const char *path, int flags, int mode) {
    int (*real)(const char *, int, ...) = dlsym(RTLD_NEXT, name);
    return flags & O_DIRECT && lacks("direct", path) ? fail() : real(path, flags, mode);
}
int open(const char *path, int flags, ...) {
    va_list rest;
    va_start(rest, flags);
    int mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, int) : 0;
    va_end(rest);
    return opened("open", path, flags, mode);
}
int open64(const char *path, int flags, ...) {
    va_list rest;
    va_start(rest, flags);
    int mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, int) : 0;
    va_end(rest);
    return opened("open64", path, flags, mode);
}
