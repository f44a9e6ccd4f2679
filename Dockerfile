# The image that k8s/base runs. It is not built in CI, which has no container engine: build it by hand after changing it.
#   docker build -t daybook:0.1.0 .

FROM rust:1.95-slim-bookworm AS build
# A C compiler's friends for the cryptography and the allocator; the compiler itself is in the base image.
RUN apt-get update \
    && apt-get install -y --no-install-recommends cmake make \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY . .
RUN cargo build --locked --profile dist --bin daybook

FROM debian:bookworm-slim
# Certificates for TLS to Postgres and RabbitMQ. Not distroless: the pod's preStop hook needs a `sleep`.
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build /src/target/dist/daybook /usr/local/bin/daybook
# Where the system backs everything with huge pages, half of them would stand empty (docs/adr/0013).
ENV MIMALLOC_ALLOW_THP=0
# A number, so that Kubernetes can see that it is not root.
USER 65532:65532
EXPOSE 8080 9090
ENTRYPOINT ["/usr/local/bin/daybook"]
CMD ["serve"]
