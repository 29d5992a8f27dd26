// Which levels of the library this processor and its system can run. The other files are compiled once
// for each level, and their functions have the level's name as a suffix (levels.py).
#include <cstring>

namespace {

bool has_avx2() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c") &&
           __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("lzcnt") &&
           __builtin_cpu_supports("movbe");
}
bool has_avx_vnni() { return has_avx2() && __builtin_cpu_supports("avxvnni"); }
bool has_avx512() {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
bool has_avx512_vnni() { return has_avx512() && __builtin_cpu_supports("avx512vnni"); }

struct Level {
    const char* name;
    bool (*runs)();
};
const Level LEVELS[] = {  // the fastest first
    {"avx512-vnni", has_avx512_vnni}, {"avx-vnni", has_avx_vnni}, {"avx512", has_avx512}, {"avx2", has_avx2},
    {"plain", [] { return true; }},
};

}  // namespace

#pragma GCC visibility push(default)
extern "C" {
// Whether the level can run here; 0 too for a name that is none.
int mk_runs(const char* name) {
    __builtin_cpu_init();
    for (const Level& level : LEVELS)
        if (!std::strcmp(level.name, name)) return level.runs();
    return 0;
}

const char* mk_best_level() {
    for (const Level& level : LEVELS)
        if (mk_runs(level.name)) return level.name;
    return "plain";
}
}
#pragma GCC visibility pop
