/* What benches/ptx has for the driver: see benches/ptx/src/driver.rs. */
#ifndef PTX_H
#define PTX_H

void kiln_ptx_allocated(unsigned long long start, unsigned long long size);
void kiln_ptx_freed(unsigned long long start);
void kiln_ptx_wrote(unsigned long long to, unsigned long long size);
void kiln_ptx_copied(unsigned long long to, unsigned long long from, unsigned long long size);

void *kiln_ptx_module(const char *text);
void kiln_ptx_unload(void *module);
void *kiln_ptx_function(const void *module, const char *name);
void kiln_ptx_allow_shared(void *function, unsigned size);
int kiln_ptx_launch(const void *function, const unsigned grid[3], const unsigned block[3], unsigned shared,
                    const void *const *arguments);

#endif
