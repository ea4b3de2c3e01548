/* A stand-in `libnvrtc.so.13`: compiles kernels for the stand-in driver, with the C++ compiler of the host.
 *
 * What it calls a cubin is a shared object. A source is compiled behind `kernels.h`, which lies beside this
 * library. With STAND_IN_DIR set, results are kept there by the hash of what was compiled.
 */
#define _GNU_SOURCE
#include <ctype.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <spawn.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define API __attribute__((visibility("default")))

enum {
    NVRTC_SUCCESS = 0,
    NVRTC_ERROR_INVALID_INPUT = 3,
    NVRTC_ERROR_INVALID_PROGRAM = 4,
    NVRTC_ERROR_INVALID_OPTION = 5,
    NVRTC_ERROR_COMPILATION = 6,
    NVRTC_ERROR_NO_NAME_EXPRESSIONS_AFTER_COMPILATION = 8,
    NVRTC_ERROR_NO_LOWERED_NAMES_BEFORE_COMPILATION = 9,
    NVRTC_ERROR_NAME_EXPRESSION_NOT_VALID = 10,
    NVRTC_ERROR_INTERNAL_ERROR = 11,
};

enum { MAXIMUM_OPTIONS = 64, MAXIMUM_EXPRESSIONS = 64 };

struct program {
    char *source;
    char *name;
    int header_count;
    char **headers; /* texts, then names */
    int expression_count;
    char *expressions[MAXIMUM_EXPRESSIONS];
    char lowered[MAXIMUM_EXPRESSIONS][32];
    bool compiled;
    char *log;
    char *image;
    size_t image_size;
};

static char *read_file(const char *path, size_t *size) {
    FILE *file = fopen(path, "rb");
    if (!file)
        return NULL;
    fseek(file, 0, SEEK_END);
    *size = (size_t)ftell(file);
    rewind(file);
    char *bytes = calloc(1, *size + 1);
    *size = fread(bytes, 1, *size, file);
    fclose(file);
    return bytes;
}

static bool write_file(const char *path, const char *text) {
    FILE *file = fopen(path, "w");
    if (!file)
        return false;
    bool written = fputs(text, file) >= 0;
    return fclose(file) == 0 && written;
}

/* The folder of this library, where the header for kernels is too. */
static const char *own_folder(void) {
    static char folder[4096];
    Dl_info info;
    if (!folder[0] && dladdr((void *)own_folder, &info)) {
        /* Others may find it by a link that lies elsewhere. */
        char *file = realpath(info.dli_fname, NULL);
        snprintf(folder, sizeof folder, "%s", file ? file : info.dli_fname);
        free(file);
        char *slash = strrchr(folder, '/');
        if (slash)
            *slash = 0;
    }
    return folder;
}

static bool is_preprocessor_line(const char *source, const char *place) {
    const char *line = place;
    do {
        while (line > source && line[-1] != '\n')
            line--;
    } while (line > source + 1 && line[-2] == '\\' && line--); /* a line that continues the one before */
    while (*line == ' ' || *line == '\t')
        line++;
    return *line == '#' || (line[0] == '/' && line[1] == '/') || line[0] == '*';
}

static bool has_c_linkage(const char *source, const char *place) {
    while (place > source && place[-1] != ';' && place[-1] != '}')
        place--;
    const char *found = strstr(place, "extern \"C\"");
    const char *kernel = strstr(place, "__global__");
    return found && found < kernel;
}

/* The name that is declared behind `__global__`: the identifier before the parameters. */
static size_t find_name(const char *declaration, const char **name) {
    const char *open = declaration;
    while ((open = strchr(open, '('))) {
        const char *end = open;
        while (end > declaration && isspace((unsigned char)end[-1]))
            end--;
        const char *start = end;
        while (start > declaration && (isalnum((unsigned char)start[-1]) || start[-1] == '_'))
            start--;
        if (strncmp(start, "__launch_bounds__", 17) != 0) {
            *name = start;
            return (size_t)(end - start);
        }
        open = strchr(open, ')');
        if (!open)
            return 0;
    }
    return 0;
}

/* Kernels that are written out, without the macro KERNEL, are exported behind the source. */
static void export_kernels(FILE *out, const char *source) {
    static const char mark[] = "__global__";
    for (const char *place = source; (place = strstr(place, mark)); place += sizeof mark - 1) {
        const char *name;
        if (is_preprocessor_line(source, place) || !has_c_linkage(source, place))
            continue;
        size_t length = find_name(place + sizeof mark - 1, &name);
        if (length)
            fprintf(out, "STAND_IN_EXPORT(%.*s, &%.*s)\n", (int)length, name, (int)length, name);
    }
}

/* Source, with what makes it an image of the stand-in driver. */
static char *complete_source(struct program *program) {
    char *text;
    size_t size;
    FILE *out = open_memstream(&text, &size);
    fprintf(out, "#include \"%s/kernels.h\"\n#line 1 \"%s\"\n%s\n#line 1 \"<exports>\"\n", own_folder(),
            program->name, program->source);
    export_kernels(out, program->source);
    for (int i = 0; i < program->expression_count; i++) {
        snprintf(program->lowered[i], sizeof program->lowered[i], "expression_%d", i);
        fprintf(out, "STAND_IN_EXPORT(%s, %s%s)\n", program->lowered[i],
                program->expressions[i][0] == '&' ? "" : "&", program->expressions[i]);
    }
    fclose(out);
    return text;
}

/* Two FNV-1a hashes of the same bytes, from different starts: 128 bits are plenty for a cache of tests. */
static void add_hash(uint64_t hash[2], const char *text) {
    for (int i = 0; i < 2; i++)
        for (const char *each = text;; each++) {
            hash[i] = (hash[i] ^ (unsigned char)*each) * 0x100000001b3u;
            if (!*each)
                break;
        }
}

/* An option of NVRTC that the compiler takes as it is; others (architectures, fast math) mean nothing here.
 */
static bool is_passed_on(const char *option) {
    static const char *const known[] = {"-D", "-I", "-U", "--define-macro=", "--undefine-macro=", "--std="};
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (!strncmp(option, known[i], strlen(known[i])))
            return true;
    return false;
}

/* The folder of an option that names one for headers; NULL for any other. */
static const char *include_folder(const char *option) {
    static const char name[] = "--include-path=";
    return strncmp(option, name, sizeof name - 1) ? NULL : option + sizeof name - 1;
}

static int spawn_compiler(const char **arguments, const char *log) {
    extern char **environ;
    char *bare[1024]; /* without LD_PRELOAD: the compiler needs no stand-in */
    int count = 0, status;
    pid_t child;
    for (char **each = environ; *each && count < 1023; each++)
        if (strncmp(*each, "LD_PRELOAD=", 11) != 0)
            bare[count++] = *each;
    bare[count] = NULL;
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
    posix_spawn_file_actions_addopen(&actions, 1, log, O_WRONLY | O_CREAT | O_APPEND, 0600);
    posix_spawn_file_actions_adddup2(&actions, 1, 2);
    int error = posix_spawnp(&child, arguments[0], &actions, NULL, (char **)arguments, bare);
    posix_spawn_file_actions_destroy(&actions);
    if (error)
        return -1;
    while (waitpid(child, &status, 0) < 0)
        if (errno != EINTR)
            return -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

#ifndef KERNEL_OPTIONS /* given where this is built */
#define KERNEL_OPTIONS "-std=c++17"
#endif

/* Compiles a source file, with the options that its header was compiled with ahead. Returns the compiler's status,
 * or -1 where it could not be run. */
static int compile(struct program *program, const char *folder, int count, const char **options) {
    const char *arguments[2 * MAXIMUM_OPTIONS + 24] = {"g++",
                                                   "-x",
                                                   "c++",
                                                   KERNEL_OPTIONS,
                                                   "-shared",
                                                   "-fdiagnostics-color=never",
                                                   "-fmax-errors=20"};
    char source[4200], output[4200], log[4200], include[4200];
    int used = 0;
    while (arguments[used])
        used++;
    snprintf(source, sizeof source, "%s/source.cu", folder);
    snprintf(output, sizeof output, "%s/image.so", folder);
    snprintf(log, sizeof log, "%s/log", folder);
    snprintf(include, sizeof include, "-I%s", folder);
    for (int i = 0; i < count; i++)
        if (is_passed_on(options[i])) {
            arguments[used++] = options[i];
        } else if (include_folder(options[i])) {
            arguments[used++] = "-I";
            arguments[used++] = include_folder(options[i]);
        }
    arguments[used++] = include;
    arguments[used++] = source;
    arguments[used++] = "-o";
    arguments[used++] = output;
    int status = spawn_compiler(arguments, log);
    size_t size;
    free(program->log);
    program->log = read_file(log, &size);
    if (status == 0)
        program->image = read_file(output, &program->image_size);
    return status;
}

static bool write_inputs(struct program *program, const char *folder, const char *text) {
    char path[4400];
    snprintf(path, sizeof path, "%s/source.cu", folder);
    bool written = write_file(path, text);
    for (int i = 0; i < program->header_count; i++) {
        snprintf(path, sizeof path, "%s/%s", folder, program->headers[program->header_count + i]);
        written = written && write_file(path, program->headers[i]);
    }
    return written;
}

static void remove_inputs(struct program *program, const char *folder) {
    static const char *const files[] = {"source.cu", "image.so", "log"};
    char path[4400];
    for (int i = 0; i < program->header_count; i++) {
        snprintf(path, sizeof path, "%s/%s", folder, program->headers[program->header_count + i]);
        unlink(path);
    }
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
        snprintf(path, sizeof path, "%s/%s", folder, files[i]);
        unlink(path);
    }
    rmdir(folder);
}

/* Compiles in a folder of its own; a result is moved to the path of the cache, if there is one. */
static int compile_aside(struct program *program, const char *text, int count, const char **options,
                         const char *kept) {
    const char *temporary = getenv("STAND_IN_DIR") ? getenv("STAND_IN_DIR") : "/tmp";
    char folder[4096], output[4200];
    snprintf(folder, sizeof folder, "%s/compile-XXXXXX", temporary);
    if (!mkdtemp(folder))
        return NVRTC_ERROR_INTERNAL_ERROR;
    int status = write_inputs(program, folder, text) ? compile(program, folder, count, options) : -1;
    snprintf(output, sizeof output, "%s/image.so", folder);
    if (status == 0 && *kept)
        rename(output, kept);
    remove_inputs(program, folder);
    if (status == 0)
        return NVRTC_SUCCESS;
    return status < 0 || status == 127 ? NVRTC_ERROR_INTERNAL_ERROR : NVRTC_ERROR_COMPILATION;
}

/* Where the result of this source with these options and headers is kept; empty without a folder for it, and
 * where headers lie in folders of the caller's: they may change. */
static void find_kept(struct program *program, const char *text, int count, const char **options, char *path,
                      size_t size) {
    uint64_t hash[2] = {0xcbf29ce484222325u, 0x9e3779b97f4a7c15u};
    const char *folder = getenv("STAND_IN_DIR");
    add_hash(hash, text);
    for (int i = 0; i < count; i++)
        if (is_passed_on(options[i]))
            add_hash(hash, options[i]);
        else if (include_folder(options[i]))
            folder = NULL;
    for (int i = 0; i < 2 * program->header_count; i++)
        add_hash(hash, program->headers[i]);
    *path = 0;
    if (folder)
        snprintf(path, size, "%s/%016lx%016lx.image", folder, (unsigned long)hash[0], (unsigned long)hash[1]);
}

API int nvrtcCompileProgram(struct program *program, int count, const char **options) {
    char kept[4200];
    if (!program || count < 0 || (count && !options))
        return NVRTC_ERROR_INVALID_INPUT;
    if (count > MAXIMUM_OPTIONS)
        return NVRTC_ERROR_INVALID_OPTION;
    char *text = complete_source(program);
    find_kept(program, text, count, options, kept, sizeof kept);
    free(program->image);
    program->image = *kept ? read_file(kept, &program->image_size) : NULL;
    int code = program->image ? NVRTC_SUCCESS : compile_aside(program, text, count, options, kept);
    free(text);
    program->compiled = true;
    return code;
}

API int nvrtcVersion(int *major, int *minor) {
    *major = 13;
    *minor = 0;
    return NVRTC_SUCCESS;
}

static const int architectures[] = {75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121};

API int nvrtcGetNumSupportedArchs(int *count) {
    *count = sizeof architectures / sizeof *architectures;
    return NVRTC_SUCCESS;
}

API int nvrtcGetSupportedArchs(int *found) {
    memcpy(found, architectures, sizeof architectures);
    return NVRTC_SUCCESS;
}

API const char *nvrtcGetErrorString(int code) {
    static const char *const names[] = {
        "NVRTC_SUCCESS",
        "NVRTC_ERROR_OUT_OF_MEMORY",
        "NVRTC_ERROR_PROGRAM_CREATION_FAILURE",
        "NVRTC_ERROR_INVALID_INPUT",
        "NVRTC_ERROR_INVALID_PROGRAM",
        "NVRTC_ERROR_INVALID_OPTION",
        "NVRTC_ERROR_COMPILATION",
        "NVRTC_ERROR_BUILTIN_OPERATION_FAILURE",
        "NVRTC_ERROR_NO_NAME_EXPRESSIONS_AFTER_COMPILATION",
        "NVRTC_ERROR_NO_LOWERED_NAMES_BEFORE_COMPILATION",
        "NVRTC_ERROR_NAME_EXPRESSION_NOT_VALID",
        "NVRTC_ERROR_INTERNAL_ERROR",
    };
    bool known = code >= 0 && (size_t)code < sizeof names / sizeof *names;
    return known ? names[code] : "NVRTC_ERROR unknown";
}

API int nvrtcCreateProgram(struct program **created, const char *source, const char *name, int count,
                           const char *const *headers, const char *const *include_names) {
    if (!created || !source || count < 0 || (count && (!headers || !include_names)))
        return NVRTC_ERROR_INVALID_INPUT;
    struct program *program = calloc(1, sizeof *program);
    program->source = strdup(source);
    program->name = strdup(name && *name ? name : "default_program");
    program->header_count = count;
    program->headers = calloc((size_t)count * 2 + 1, sizeof *program->headers);
    for (int i = 0; i < count; i++) {
        program->headers[i] = strdup(headers[i]);
        program->headers[count + i] = strdup(include_names[i]);
    }
    *created = program;
    return NVRTC_SUCCESS;
}

API int nvrtcDestroyProgram(struct program **destroyed) {
    struct program *program = destroyed ? *destroyed : NULL;
    if (!program)
        return NVRTC_ERROR_INVALID_PROGRAM;
    for (int i = 0; i < 2 * program->header_count; i++)
        free(program->headers[i]);
    for (int i = 0; i < program->expression_count; i++)
        free(program->expressions[i]);
    free(program->headers);
    free(program->source);
    free(program->name);
    free(program->log);
    free(program->image);
    free(program);
    *destroyed = NULL;
    return NVRTC_SUCCESS;
}

static int give_size(struct program *program, size_t *size) {
    if (!program || !program->image)
        return NVRTC_ERROR_INVALID_PROGRAM;
    *size = program->image_size;
    return NVRTC_SUCCESS;
}

static int give_image(struct program *program, char *image) {
    if (!program || !program->image)
        return NVRTC_ERROR_INVALID_PROGRAM;
    memcpy(image, program->image, program->image_size);
    return NVRTC_SUCCESS;
}

API int nvrtcGetCUBINSize(struct program *program, size_t *size) {
    return give_size(program, size);
}

API int nvrtcGetCUBIN(struct program *program, char *image) {
    return give_image(program, image);
}

/* There is no other form of code: the driver takes the same image for it. */
API int nvrtcGetPTXSize(struct program *program, size_t *size) {
    return give_size(program, size);
}

API int nvrtcGetPTX(struct program *program, char *image) {
    return give_image(program, image);
}

API int nvrtcGetProgramLogSize(struct program *program, size_t *size) {
    if (!program)
        return NVRTC_ERROR_INVALID_PROGRAM;
    *size = program->log ? strlen(program->log) + 1 : 1;
    return NVRTC_SUCCESS;
}

API int nvrtcGetProgramLog(struct program *program, char *log) {
    if (!program)
        return NVRTC_ERROR_INVALID_PROGRAM;
    strcpy(log, program->log ? program->log : "");
    return NVRTC_SUCCESS;
}

API int nvrtcAddNameExpression(struct program *program, const char *expression) {
    if (!program || !expression)
        return NVRTC_ERROR_INVALID_PROGRAM;
    if (program->compiled)
        return NVRTC_ERROR_NO_NAME_EXPRESSIONS_AFTER_COMPILATION;
    if (program->expression_count == MAXIMUM_EXPRESSIONS)
        return NVRTC_ERROR_INVALID_INPUT;
    program->expressions[program->expression_count++] = strdup(expression);
    return NVRTC_SUCCESS;
}

API int nvrtcGetLoweredName(struct program *program, const char *expression, const char **name) {
    if (!program || !program->compiled)
        return NVRTC_ERROR_NO_LOWERED_NAMES_BEFORE_COMPILATION;
    for (int i = 0; i < program->expression_count; i++)
        if (!strcmp(program->expressions[i], expression)) {
            *name = program->lowered[i];
            return NVRTC_SUCCESS;
        }
    return NVRTC_ERROR_NAME_EXPRESSION_NOT_VALID;
}

/* In place of the code of link-time optimization, too. */
API int nvrtcGetLTOIRSize(struct program *program, size_t *size) {
    return give_size(program, size);
}

API int nvrtcGetLTOIR(struct program *program, char *image) {
    return give_image(program, image);
}
