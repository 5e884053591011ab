#!/bin/sh
# An authority of your own, and a certificate of the SuperLink by it. Sites need ca.pem; ca.key stays where nobody else reads it.
#
#     sh certificates.sh server.example            # writes ca.key, ca.pem, server.key and server.pem into this folder
#     sh certificates.sh 127.0.0.1
set -eu
umask 077
host=${1:?the name or the address by which sites reach the SuperLink}
case $host in
    *[!0-9.]*) kind=DNS ;;
    *) kind=IP ;;
esac
openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 365 -subj /CN=clinics \
    -keyout ca.key -out ca.pem
openssl req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj "/CN=$host" -keyout server.key -out server.csr
echo "subjectAltName=$kind:$host" > server.ext
openssl x509 -req -in server.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 365 -extfile server.ext -out server.pem
rm server.csr server.ext
