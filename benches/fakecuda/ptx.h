/* What benches/ptx has for the driver: see benches/ptx/src/driver.rs. Without HAS_PTX, which setup.sh defines,
 * the driver is built from C alone, and kernels compute nothing. */
#ifndef PTX_H
#define PTX_H

#ifndef HAS_PTX
#define HAS_PTX 0
#pragma weak kiln_ptx_allocated
#pragma weak kiln_ptx_freed
#pragma weak kiln_ptx_wrote
#pragma weak kiln_ptx_copied
#pragma weak kiln_ptx_module
#pragma weak kiln_ptx_unload
#pragma weak kiln_ptx_function
#pragma weak kiln_ptx_allow_shared
#pragma weak kiln_ptx_launch
#endif

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
